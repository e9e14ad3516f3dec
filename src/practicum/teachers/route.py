"""Pure functions that find a prompt's teacher and the prefix that only the teacher reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from practicum.errors import DataError
from practicum.recipe.checks.routing import destinations
from practicum.recipe.checks.value_forms import fields_of, fill
from practicum.recipe.schema.teacher_sections import Route, Teacher
from practicum.tasks.draws import mix
from practicum.tasks.prompts import Prompt, answer_text
from practicum.user_code import encodable


class RoutingError(DataError):
    """A row that lacks the column of route.by or prompt_prefix. `fault` describes its value."""

    def __init__(self, prompt: Prompt, fault: str, reader: str) -> None:
        self.fault = fault
        super().__init__(f"{prompt} has {fault}; {reader} needs a string or a number there")


def teacher_of(prompt: Prompt, route: Route, teachers: Collection[str], seed: int) -> str:
    """Return the teacher of a prompt, which depends only on recipe, seed and prompt. A single teacher takes
    every prompt. Among several with weights, one is drawn by (seed, prompt.uid)."""
    if len(teachers) == 1:
        return next(iter(teachers))
    value = routed_value(prompt, route)
    weights = destinations(route, value)
    if missing := [name for name in weights if name not in teachers]:
        raise DataError(
            f"{prompt} has the {route.by} {value!r}, but no teacher has the name {missing[0]!r}: "
            f"the teachers are {', '.join(teachers)}.\n"
            f"  → set route.map: {{{value}: …}} to one of these."
        )
    return _draw(weights, seed, prompt.uid)


def routed_value(prompt: Prompt, route: Route) -> str:
    """Return the value by which a prompt is routed: its domain, task or a column of its row."""
    if route.by == "domain":
        return prompt.domain
    if route.by == "task":
        return prompt.task
    return _column(prompt, route.by, "route.by")


def before_text(teacher: Teacher, prompt: Prompt) -> str:
    """Return the teacher's prompt prefix, filled in from the prompt's row, or ""."""
    text = teacher.prompt_prefix or ""
    return encodable(fill(text, {field: _field(prompt, field) for field in fields_of(text)}))


def _draw(weights: Mapping[str, float], seed: int, uid: int) -> str:
    names = sorted(weights)
    left = (mix(seed, "teacher", uid) >> 11) * 2.0**-53 * sum(weights[name] for name in names)
    for name in names[:-1]:
        left -= weights[name]
        if left < 0:
            return name
    return names[-1]


def _field(prompt: Prompt, field: str) -> str:
    if field != "answer":
        return _column(prompt, field, "prompt_prefix")
    try:
        return answer_text(prompt.answer)
    except DataError:
        raise RoutingError(prompt, f"the answer {prompt.answer!r}", "prompt_prefix") from None


def _column(prompt: Prompt, column: str, reader: str) -> str:
    row: Mapping[str, Any] = prompt.row
    if column not in row:
        raise RoutingError(
            prompt, f"no column {column!r} (only {', '.join(map(repr, row)) or 'none'})", reader
        )
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RoutingError(prompt, f"{value!r} in column {column!r}", reader)
    return str(value)
