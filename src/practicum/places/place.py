"""What a teacher offers wherever it lives: token sequences in, scores of the response tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import TeacherError


class ModelPlace(Protocol):
    """Where a frozen model lives. Its work is coroutines of the process's one event loop."""

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        ...

    def close(self) -> None:
        """Release what it holds; work under way fails."""
        ...


class TeacherPlace(ModelPlace, Protocol):
    """Where a teacher lives."""

    @property
    def name(self) -> str:
        """The teacher's name in the recipe."""
        ...

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row; a TeacherError names the teacher and the row."""
        ...


UNDECLARED = 8192
"""Longest sequence in tokens for a model that does not declare one."""


def require_room(teacher: str, row: ScoreRequest, context: int | None) -> None:
    """A TeacherError if a row does not fit the teacher's context; None is no limit."""
    if context is not None and len(row.ids) > context:
        raise TeacherError(
            f"teacher {teacher} can't score {row.name}: {len(row.ids)} tokens, its context is {context}; "
            f"shorten prompts or answers, or raise teachers.{teacher}.context"
        )


async def score_rows(
    place: TeacherPlace, rows: Sequence[ScoreRequest], options: ScoreOptions
) -> list[Scores]:
    """Scores of all rows, asked for at once. A row that fails cancels the others and its error surfaces."""
    return await gather_all(place.score(row, options) for row in rows)
