"""What a reward model is shown, and what it offers wherever it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from practicum.concurrency.gather import gather_all
from practicum.errors import TeacherError
from practicum.places.place import ModelPlace


class CannotScore(TeacherError):
    """This answer has no score. The message follows the model's name; other answers may have scores."""


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A finished answer to judge, as text: another model can't read the student's tokens."""

    name: str
    """For errors, such as "prompt 3/session 1/trajectory 0"."""
    prompt: str
    response: str
    answer: str | None
    """The right answer, if the row has one."""
    messages: tuple[dict[str, str], ...] | None = None
    """The conversation with the response as its last message, if the prompt is a chat."""


class RewardPlace(ModelPlace, Protocol):
    """Where a reward model lives."""

    async def judge(self, case: JudgeInput) -> float:
        """The model's score; CannotScore if this case has none, a TeacherError if the model has failed."""
        ...


async def score_all(place: RewardPlace, cases: Sequence[JudgeInput]) -> list[float | CannotScore]:
    """Scores of all cases, asked for at once; a TeacherError of one cancels the others and surfaces."""

    async def score(case: JudgeInput) -> float | CannotScore:
        try:
            return await place.judge(case)
        except CannotScore as failure:
            return failure

    return await gather_all(score(case) for case in cases)
