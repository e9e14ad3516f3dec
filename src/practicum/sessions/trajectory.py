"""A trajectory: the tokens of one context, who put them there, and what was counted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from practicum.engines.protocol import Generation
from practicum.models.images import Images
from practicum.tasks.messages import Message


@dataclass(slots=True)
class TokenSpan:
    """Consecutive response tokens of one origin: a turn of the student, or given by a tool or template."""

    ids: Tensor
    sampled: bool
    logprobs: Tensor
    plain_logprobs: Tensor
    version: int | None = None
    """The weights that sampled it; the oldest, if they changed meanwhile."""


@dataclass(eq=False, slots=True)
class Trajectory:
    """Tokens of one context: a prompt, then sampled and given pieces in order."""

    prompt_ids: list[int]
    images: Images | None = None
    messages: list[Message] = field(default_factory=list)
    """What was said before the turn that is open; its tokens are those from `turn_start` on."""
    turn_start: int = 0
    pieces: list[TokenSpan] = field(default_factory=list)
    version_min: int | None = None
    version_max: int = 0
    finish: str = ""
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    breaks: int = 0
    """1 if it was opened because the chat template rewrites what the trajectory before it holds."""
    reward: float | None = None
    """What the loop says that this trajectory is worth, if it says so."""
    trace: str | None = None
    """The traceback of the first tool of the user's that raised in it."""
    experts: Tensor | None = None
    """Experts that the first tokens took [n, L, E]; the rest were never an input."""

    def add_sampled(self, generation: Generation) -> None:
        """Append a turn that the student sampled."""
        self._merge_experts(generation.experts)
        first = generation.version_min
        numbers = generation.tokens, True, generation.logprobs, generation.plain_logprobs
        self.pieces.append(TokenSpan(*numbers, version=first))
        self.version_min = first if self.version_min is None else min(self.version_min, first)
        self.version_max = max(self.version_max, generation.version_max)
        self.finish = generation.finish
        self.turns += 1

    def add_given(self, ids: Sequence[int]) -> None:
        """Append tokens that a tool or a template put in; they are not trained on."""
        if ids:
            zeros = torch.zeros(len(ids))
            self.pieces.append(TokenSpan(torch.tensor(ids, dtype=torch.int64), False, zeros, zeros))

    def ids(self) -> list[int]:
        """Prompt and response so far."""
        return self.prompt_ids + [i for piece in self.pieces for i in piece.ids.tolist()]

    def sampled(self) -> list[list[int]]:
        """The tokens of each turn of the student."""
        return [piece.ids.tolist() for piece in self.pieces if piece.sampled]

    def versions(self) -> list[int | None]:
        """The version of the weights that sampled each response token; None for given ones."""
        return [piece.version for piece in self.pieces for _ in range(len(piece.ids))]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if piece.sampled)

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(piece.ids) for piece in self.pieces)

    def columns(self) -> dict[str, Tensor]:
        """The row's fields as the data plane names them."""
        pieces = self.pieces
        empty_ids, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        masks = [torch.full_like(piece.ids, piece.sampled, dtype=torch.bool) for piece in pieces]
        columns = {
            "prompt_ids": torch.tensor(self.prompt_ids, dtype=torch.int64),
            "response_ids": torch.cat([p.ids for p in pieces]) if pieces else empty_ids,
            "response_mask": torch.cat(masks) if pieces else empty_ids.bool(),
            "rollout_logprobs": torch.cat([p.logprobs for p in pieces]) if pieces else empty,
            "plain_logprobs": torch.cat([p.plain_logprobs for p in pieces]) if pieces else empty,
        }
        if self.experts is not None:
            missing = len(self) - len(self.experts)
            columns["routed_experts"] = torch.cat(
                [self.experts, self.experts.new_zeros(missing, *self.experts.shape[1:])]
            )
        return columns

    def _merge_experts(self, experts: Tensor | None) -> None:
        """Keep what is known: a sampled token's experts are those it had when it was sampled."""
        if self.experts is None or experts is None:
            self.experts = experts
        else:
            self.experts = torch.cat([self.experts, experts[len(self.experts) :]])
