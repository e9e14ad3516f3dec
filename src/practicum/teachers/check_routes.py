"""Check against the tasks' rows that every prompt has a teacher and every teacher a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.checks.routing import destinations, in_targets, value_of_task
from practicum.recipe.checks.value_forms import fields_of
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.recipe.schema.teacher_sections import Route, Teacher
from practicum.recipe.text.type_text import nearest
from practicum.tasks.prompts import Prompt
from practicum.tasks.rows import open_rows
from practicum.tasks.stream import make_stream
from practicum.tasks.tables import train_location
from practicum.teachers.route import RoutingError, before_text, routed_value

_SHOWN = 3


class Locations(dict[str, list[str]]):
    """Locations of the first rows with a value or a fault, and the number of such rows."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def add(self, key: str, place: str) -> None:
        self.counts[key] += 1
        if self.counts[key] <= _SHOWN:
            self.setdefault(key, []).append(place)

    def listed(self, key: str) -> str:
        more = self.counts[key] - _SHOWN
        return "; ".join(self[key]) + (f" and {more:,} more" if more > 0 else "")


def check_routes(recipe: Recipe) -> list[str]:
    """Return messages about the routes. Raise RecipeErrors for prompts or teachers without the other."""
    route, teachers = recipe.route, recipe.teachers
    values, faults = Locations(), Locations()
    why: dict[str, str] = {}
    for place, prompt in _prompts(route, teachers, recipe.tasks, recipe.seed):
        key, names = "route.by", list(teachers)
        try:
            if len(teachers) > 1:
                value = routed_value(prompt, route)
                values.add(value, place)
                names = [name for name in destinations(route, value) if name in teachers]
            for name in names:
                key = f"teachers.{name}.prompt_prefix"
                before_text(teachers[name], prompt)
        except RoutingError as error:
            faults.add(key, place)
            why.setdefault(key, error.fault)
    problems = [
        RecipeError(
            key,
            f"{why[key]} in {f'{count:,} rows: ' if count > 1 else ''}{faults.listed(key)}",
            "a string or a number in each row",
            "add the column to these rows, or use a property of every prompt",
        )
        for key, count in faults.counts.items()
    ]
    if len(teachers) > 1:
        problems += _uncovered(route, teachers, values)
        if "route.by" not in faults:
            problems += _unused(route, teachers, values)
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    if len(teachers) == 1:
        return [f"route: every prompt goes to {next(iter(teachers))}"]
    return [f"route: {route.by} {value!r} → {_shares(destinations(route, value))}" for value in values]


def _prompts(
    route: Route, teachers: Mapping[str, Teacher], tasks: Mapping[str, Task], seed: int
) -> Iterator[tuple[str, Prompt]]:
    """Yield prompts with locations: all rows of a task, or one if all are routed and filled alike."""
    reads_rows = any(fields_of(teacher.prompt_prefix or "") for teacher in teachers.values())
    for name, task in tasks.items():
        known = len(teachers) == 1 or value_of_task(route, name, task) is not None
        at = train_location(task)
        if at is None or (known and not reads_rows):
            yield f"task {name}", make_stream({name: task}, seed).prompt(0)
            continue
        source = open_rows(name, task, at)
        for index in range(len(source)):
            yield source.where(index), source.prompt(index, index)


def _uncovered(route: Route, teachers: Mapping[str, Teacher], values: Locations) -> Iterator[RecipeError]:
    lost = [value for value in values if any(name not in teachers for name in destinations(route, value))]
    for value in lost[:_SHOWN]:
        found = f"no teacher for the {route.by} {value!r} of {values.listed(value)}"
        expected = f"a teacher named {value}, or an entry of route.map for {value}"
        meant = f"did you mean {close}? " if (close := nearest(value, teachers)) else ""
        advice = f"{meant}set route.map: {{{value}: {' or '.join(teachers)}}}"
        yield RecipeError("route.map", found, expected, advice)
    if len(lost) > _SHOWN:
        found = f"{len(lost) - _SHOWN:,} more values of {route.by} without a teacher"
        yield RecipeError("route.map", found, "a teacher for each value")


def _unused(route: Route, teachers: Mapping[str, Teacher], values: Locations) -> Iterator[RecipeError]:
    reached = {name for value in values for name in destinations(route, value)} | in_targets(teachers)
    shown = ", ".join(list(values)[:10]) + (", …" if len(values) > 10 else "")
    for name in (name for name in teachers if name not in reached):
        found = f"a teacher without prompts (by {route.by}: {shown})"
        advice = f"remove it, or map a {route.by} to it in route.map"
        yield RecipeError(f"teachers.{name}", found, "prompts for each teacher", advice)
    for value in (value for value in route.map if value not in values):
        yield RecipeError(f"route.map.{value}", f"a {route.by} of no prompt", f"one of {shown}", "remove it")


def _shares(weights: dict[str, float]) -> str:
    total = sum(weights.values())
    return ", ".join(
        f"{name} {weight / total:.0%}" if weight < total else name for name, weight in weights.items()
    )
