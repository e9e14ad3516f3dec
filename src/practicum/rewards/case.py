"""What a reward model is shown, what it may fail on, and what every place of one offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from practicum.concurrency.gather import gather_all
from practicum.errors import TeacherError


class CannotScore(TeacherError):
    """This one answer has no score, in words that follow the model's name; others may have theirs."""


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A finished answer to judge, as text: tokens of the student mean nothing to another model."""

    name: str
    """For errors, such as "prompt 3/session 1/trajectory 0"."""
    prompt: str
    response: str
    answer: str | None
    """What would be right, if the row says."""
    messages: tuple[dict[str, str], ...] | None = None
    """The conversation with the response as its last message, if the prompt is a chat."""


class RewardPlace(Protocol):
    """Where a reward model lives. `judge` is a coroutine of the process's one event loop."""

    @property
    def name(self) -> str:
        """Its name in the recipe."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of judging so far."""
        ...

    async def judge(self, case: JudgeInput) -> float:
        """The model's score; Unjudged if this case has none, a TeacherError if the model can't go on."""
        ...

    def close(self) -> None:
        """Let go of what it holds; cases under way fail."""
        ...


async def score_all(place: RewardPlace, cases: Sequence[JudgeInput]) -> list[float | CannotScore]:
    """Scores of all cases, asked for at once; a TeacherError of one cancels the others and surfaces."""

    async def one(case: JudgeInput) -> float | CannotScore:
        try:
            return await place.judge(case)
        except CannotScore as failure:
            return failure

    return await gather_all(one(case) for case in cases)
