"""The interface of reward models in any placement, and the parsing of a judge's reply."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

from practicum.engines.protocol import Sleeper
from practicum.errors import RecipeError, TeacherError
from practicum.recipe.checks.value_forms import fields_of, fill
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.user_code import FLOAT32_MAX, encodable, shorten

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_SCALE = 0.1
"""Scale of a judge's rating from 0 to 10."""


class CannotScore(TeacherError):
    """A response that can't be scored. The message follows the model's name."""


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A finished response as text, because another model has other tokens."""

    name: str
    """Name for errors, such as "prompt 3/session 1/trajectory 0"."""
    prompt: str
    response: str
    answer: str | None
    """The expected answer, if the row has one."""
    messages: tuple[dict[str, str], ...] | None = None
    """The conversation with the response as its last message, if the prompt is a chat."""


class Judge(Protocol):
    """A reward model. Its coroutines run on the process's event loop."""

    sleeper: Sleeper | None = None
    """The model that must be awake, if it may sleep."""

    async def judge(self, case: JudgeInput) -> float:
        """Return the model's score. Raise CannotScore if it has none."""
        ...

    def ready(self) -> None:
        """Wait until it is ready."""

    def abort(self, why: str) -> None:
        """Kill its process, if any, after a missed deadline."""

    def close(self) -> None:
        """Release all resources. Open cases fail."""


def question(model: RewardModel, case: JudgeInput) -> str:
    """Return the prompt of a judge."""
    if case.answer is None and "answer" in fields_of(model.prompt):
        raise CannotScore("has a prompt with {answer}, and this row has none")
    known = {"prompt": case.prompt, "response": case.response, "answer": case.answer or ""}
    return encodable(fill(model.prompt, known))


def read_score(reply: str) -> float:
    """Return the first number of a reply, scaled."""
    number = _NUMBER.search(reply)
    if number is None:
        raise CannotScore(f"replied {shorten(reply, 80)!r}, which has no number")
    return require_finite(_SCALE * float(number[0]))


def require_finite(score: float) -> float:
    """Return the score if it is a finite float32."""
    if not math.isfinite(score) or abs(score) > FLOAT32_MAX:
        raise CannotScore(f"returned the score {score}, expected a finite number")
    return score


def check_label(path: str, label: int, count: int) -> None:
    """Raise if the classifier has no such output."""
    if label >= count:
        expected = "0, its only output" if count == 1 else f"0 to {count - 1}: it has {count} outputs"
        raise RecipeError(f"{path}.label", f"{label}", expected)
