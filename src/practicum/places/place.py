"""What a teacher offers wherever it lives: token sequences in, scores of the response tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Scores
from practicum.models.images import Images


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What is asked of each row beside the logprobs of its tokens."""

    top_k: int = 0
    hidden: bool = False
    temperature: float = 1.0
    vocab: int | None = None
    """The student's outputs: a teacher's beyond them do not count."""


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A whole token sequence, unpadded; scores are of ids[start:]."""

    ids: Sequence[int]
    start: int
    name: str
    """For errors, such as "prompt 3/session 1/trajectory 0"."""
    images: Images | None = None


class TeacherPlace(Protocol):
    """Where a teacher lives. `score` is a coroutine of the process's one event loop."""

    @property
    def name(self) -> str:
        """The teacher's name in the recipe."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds of scoring so far."""
        ...

    async def score(self, row: ScoreRow, wanted: ScoreOptions) -> Scores:
        """Scores of one row; a TeacherError names the teacher and the row."""
        ...

    def close(self) -> None:
        """Release what it holds; rows under way fail."""
        ...


UNDECLARED = 8192
"""Longest sequence in tokens for a model that does not declare one."""


def too_long(teacher: str, row: ScoreRow, context: int) -> str:
    """The sentence for a row that does not fit the teacher's context."""
    return (
        f"teacher {teacher} can't score {row.name}: {len(row.ids)} tokens, its context is {context}; "
        f"shorten prompts or answers, or raise teachers.{teacher}.context"
    )


async def score_rows(place: TeacherPlace, rows: Sequence[ScoreRow], wanted: ScoreOptions) -> list[Scores]:
    """Scores of all rows, asked for at once. A row that fails cancels the others and its error surfaces."""
    return await gather_all(place.score(row, wanted) for row in rows)
