"""Whether every prompt has a teacher and every teacher a prompt, by reading the tasks' rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.checks.routing import destinations, value_of_task
from practicum.recipe.checks.value_forms import fields_of
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.type_text import nearest
from practicum.tasks.locations import open_rows, train_location
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import draw_row, make_stream, to_prompt
from practicum.teachers.route import UnfitRow, before_text, routed_value

_SHOWN = 3


@dataclass
class _Rows:
    """Rows with something in common: how many, and where the first few are."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    fault: str = ""

    def add(self, place: str, fault: str = "") -> None:
        self.count += 1
        self.fault = self.fault or fault
        if len(self.places) < _SHOWN:
            self.places.append(place)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.places):,} more" if self.count > len(self.places) else ""
        return "; ".join(self.places) + more


def check_routes(recipe: Recipe) -> list[str]:
    """What goes where, in sentences; a prompt without a teacher, or the reverse, is a RecipeError."""
    values, faults = _read(recipe)
    problems = [_fault(path, rows) for path, rows in faults.items()]
    if len(recipe.teachers) > 1:
        problems += _uncovered(recipe, values)
        if "route.by" not in faults:
            problems += _unused(recipe, values)
    if problems:
        raise RecipeErrors(f"recipe {recipe.name}", problems)
    if len(recipe.teachers) == 1:
        return [f"route: every prompt goes to {next(iter(recipe.teachers))}"]
    return [f"route: {recipe.route.by} {value!r} → {_teachers_of(recipe, value)}" for value in values]


def _read(recipe: Recipe) -> tuple[dict[str, _Rows], dict[str, _Rows]]:
    """Routed values with their rows, and rows that can't be routed or filled into `before`, by key."""
    values: dict[str, _Rows] = {}
    faults: dict[str, _Rows] = {}
    for place, prompt in _prompts(recipe):
        names: Iterable[str] = recipe.teachers
        if len(recipe.teachers) > 1:
            try:
                value = routed_value(prompt, recipe.route)
            except UnfitRow as error:
                faults.setdefault("route.by", _Rows()).add(place, error.fault)
                continue
            values.setdefault(value, _Rows()).add(place)
            names = destinations(recipe.route, value)
        for name in names:
            if name in recipe.teachers:
                _try_before(recipe, name, prompt, place, faults)
    return values, faults


def _try_before(recipe: Recipe, name: str, prompt: Prompt, place: str, faults: dict[str, _Rows]) -> None:
    try:
        before_text(recipe.teachers[name], prompt)
    except UnfitRow as error:
        faults.setdefault(f"teachers.{name}.before", _Rows()).add(place, error.fault)


def _prompts(recipe: Recipe) -> Iterator[tuple[str, Prompt]]:
    """Prompts with where they are: all rows of a task, or one where all are routed and filled alike."""
    several = len(recipe.teachers) > 1
    reads_rows = any(fields_of(teacher.before or "") for teacher in recipe.teachers.values())
    for name, task in recipe.tasks.items():
        known = not several or value_of_task(recipe.route, name, task) is not None
        at = train_location(task)
        if at is None or (known and not reads_rows):
            yield f"task {name}", make_stream({name: task}, recipe.seed).prompt(0)
            continue
        source = open_rows(name, task, at)
        for index in range(len(source)):
            yield source.where(index), to_prompt(index, name, task, draw_row(source, index))


def _fault(path: str, rows: _Rows) -> RecipeError:
    found = f"{rows.fault} in {f'{rows.count:,} rows: ' if rows.count > 1 else ''}{rows}"
    advice = "add the column to these rows, or name what every prompt has"
    return RecipeError(path, found, "text or a number in each row", advice)


def _uncovered(recipe: Recipe, values: dict[str, _Rows]) -> list[RecipeError]:
    route, teachers = recipe.route, recipe.teachers
    problems = []
    lost = {v: r for v, r in values.items() if any(n not in teachers for n in destinations(route, v))}
    for value, rows in list(lost.items())[:_SHOWN]:
        close = nearest(value, teachers)
        meant = f"did you mean {close}? " if close else ""
        problems.append(
            RecipeError(
                "route.to",
                f"no teacher for the {route.by} {value!r} of {rows}",
                f"a teacher named {value}, or an entry of route.to for {value}",
                f"{meant}set route.to: {{{value}: {' or '.join(teachers)}}}",
            )
        )
    if len(lost) > _SHOWN:
        found = f"{len(lost) - _SHOWN:,} more values of {route.by} without a teacher"
        problems.append(RecipeError("route.to", found, "a teacher for each value"))
    return problems


def _unused(recipe: Recipe, values: dict[str, _Rows]) -> list[RecipeError]:
    route = recipe.route
    reached = {name for value in values for name in destinations(route, value)}
    shown = ", ".join(list(values)[:10]) + (", …" if len(values) > 10 else "")
    advice = f"remove it, or let route.to send it a value of {route.by}"
    unused = [
        RecipeError(
            f"teachers.{name}",
            f"a teacher that no prompt goes to (by {route.by}: {shown})",
            "prompts for each teacher",
            advice,
        )
        for name in recipe.teachers
        if name not in reached
    ]
    return unused + [
        RecipeError(f"route.to.{value}", f"a {route.by} of no prompt", f"one of {shown}", "remove it")
        for value in route.to
        if value not in values
    ]


def _teachers_of(recipe: Recipe, value: str) -> str:
    weights = destinations(recipe.route, value)
    total = sum(weights.values())
    if len(weights) == 1:
        return next(iter(weights))
    return ", ".join(f"{name} {weight / total:.0%}" for name, weight in weights.items())
