"""Who writes the next turn of a trajectory: the engine, or an expert whose turns are demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from practicum.engines.protocol import Counter, Engine, GenerateRequest, Generation, Sampling
from practicum.errors import EngineError
from practicum.sessions.chat import tokenise
from practicum.sessions.trajectory import Trajectory
from practicum.tasks.messages import Message
from practicum.tasks.prompts import Prompt

if TYPE_CHECKING:
    from practicum.sessions.session import Session


class Policy(Protocol):
    """Writes turns."""

    async def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        """The turn that follows the trajectory's tokens."""
        ...


class EnginePolicy:
    """Turns sampled by an engine: the student. With `keep`, the engine may keep each for the next one."""

    def __init__(self, engine: Engine, *, keep: bool = False) -> None:
        self._engine, self._keep = engine, keep

    async def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        return await self._engine.generate(
            GenerateRequest(
                trajectory.ids(),
                sampling,
                counter,
                images=trajectory.images,
                experts=trajectory.experts,
                keep=self._keep,
            )
        )


class DemonstratorPolicy:
    """Turns of an expert, who is given the prompt and the conversation so far; each ends with the EOS.

    A loop that runs with it leaves demonstrations: tokens to learn from that nobody sampled.
    """

    def __init__(
        self, expert: Callable[[Prompt, list[Message]], str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        if not isinstance(tokenizer.eos_token_id, int):
            raise EngineError("an expert's turns end with the EOS, and the tokenizer has none")
        self._expert, self._tokenizer, self._end = expert, tokenizer, tokenizer.eos_token_id

    async def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        ids = [*tokenise(self._tokenizer, self._expert(session.prompt, session.messages)), self._end]
        if len(ids) > session.room:
            raise EngineError(
                f"{session.prompt}: the expert's turn {trajectory.turns + 1} has {len(ids)} tokens, and "
                f"{session.room} are left of a context of {session.context}"
            )
        zeros = torch.zeros(len(ids))
        return Generation(torch.tensor(ids, dtype=torch.int64), zeros, zeros, "stop", 0, 0)
