"""A session: one attempt at a prompt, of one or more turns, that leaves one or more trajectories."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from practicum.errors import EngineError
from practicum.rollout.protocol import Counter, Engine, Generation, Sampling
from practicum.tasks.prompts import Prompt


@dataclass(slots=True)
class _Piece:
    """Consecutive response tokens of one origin: sampled by the student, or given by a tool or template."""

    ids: Tensor
    sampled: bool
    logprobs: Tensor
    plain_logprobs: Tensor


@dataclass(slots=True)
class Trajectory:
    """Tokens of one context: a prompt, then sampled and given pieces in order."""

    prompt_ids: list[int]
    pieces: list[_Piece] = field(default_factory=list)
    version_min: int | None = None
    version_max: int = 0
    finish: str = ""

    def add_sampled(self, generation: Generation) -> None:
        """Append what the student sampled."""
        self.pieces.append(_Piece(generation.tokens, True, generation.logprobs, generation.plain_logprobs))
        first = generation.version_min
        self.version_min = first if self.version_min is None else min(self.version_min, first)
        self.version_max = max(self.version_max, generation.version_max)
        self.finish = generation.finish

    def add_given(self, ids: Sequence[int]) -> None:
        """Append tokens that a tool or a template put in; they are not trained on."""
        zeros = torch.zeros(len(ids))
        self.pieces.append(_Piece(torch.tensor(ids, dtype=torch.int64), False, zeros, zeros))

    def add_demonstration(self, ids: Sequence[int]) -> None:
        """Append tokens to learn from that nobody sampled: supervised training."""
        zeros = torch.zeros(len(ids))
        self.pieces.append(_Piece(torch.tensor(ids, dtype=torch.int64), True, zeros, zeros))
        self.finish = "stop"

    def ids(self) -> list[int]:
        """Prompt and response so far."""
        return self.prompt_ids + [i for piece in self.pieces for i in piece.ids.tolist()]

    def columns(self) -> dict[str, Tensor]:
        """The row's fields as the data plane names them."""
        pieces = self.pieces
        empty_ids, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        masks = [torch.full_like(piece.ids, piece.sampled, dtype=torch.bool) for piece in pieces]
        return {
            "prompt_ids": torch.tensor(self.prompt_ids, dtype=torch.int64),
            "response_ids": torch.cat([p.ids for p in pieces]) if pieces else empty_ids,
            "response_mask": torch.cat(masks) if pieces else empty_ids.bool(),
            "rollout_logprobs": torch.cat([p.logprobs for p in pieces]) if pieces else empty,
            "plain_logprobs": torch.cat([p.plain_logprobs for p in pieces]) if pieces else empty,
        }


class Session:
    """What an agent loop works with: the prompt, the engine, and the trajectories it opens.

    Every turn of every session has its own randomness, so a session's samples do not depend on others.
    """

    def __init__(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        index: int,
        engine: Engine,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> None:
        self.prompt, self.prompt_ids, self.index = prompt, prompt_ids, index
        self.tokenizer, self.sampling = tokenizer, sampling
        self._engine, self._seed, self._turn = engine, seed, 0

    def new_trajectory(self, prompt_ids: Sequence[int] | None = None) -> Trajectory:
        """Open a context: with these tokens, or with the prompt's."""
        return Trajectory(list(self.prompt_ids if prompt_ids is None else prompt_ids))

    async def generate(
        self,
        trajectory: Trajectory,
        *,
        max_new_tokens: int | None = None,
        stop: frozenset[int] | None = None,
    ) -> Generation:
        """Sample the next turn and append it; another length or other stop tokens, if given.

        The distribution is the recipe's in every turn: it is the one that the learner trains.
        """
        counter = Counter(self._seed, self.prompt.uid, self.index, self._turn)
        self._turn += 1
        sampling = replace(
            self.sampling,
            max_new_tokens=max_new_tokens or self.sampling.max_new_tokens,
            stop=self.sampling.stop if stop is None else stop,
        )
        generation = await self._engine.generate(trajectory.ids(), sampling, counter)
        trajectory.add_sampled(generation)
        return generation

    def text(self, trajectory: Trajectory) -> str:
        """What the student wrote, for people and checkers."""
        ids = [i for piece in trajectory.pieces if piece.sampled for i in piece.ids.tolist()]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


Loop = Callable[[Session], Awaitable[list[Trajectory]]]


def require_trajectories(result: object, loop: str) -> list[Trajectory]:
    """What a loop returned, if it is what a loop must return."""
    if isinstance(result, list) and result and all(isinstance(t, Trajectory) for t in result):
        return result
    raise EngineError(
        f"agent loop {loop} returned {type(result).__name__}; expected a non-empty list of Trajectory"
    )
