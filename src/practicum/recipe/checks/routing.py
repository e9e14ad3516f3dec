"""Resolve which teachers score which prompts, and check the route and its shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from practicum.errors import RecipeError
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.recipe.schema.teacher_sections import Route, Teacher
from practicum.recipe.text.type_text import nearest


def destinations(route: Route, value: str) -> dict[str, float]:
    """Return the teachers of a value with their weights. A value not in route.map names its teacher."""
    teacher = route.map.get(value, value)
    return {teacher: 1.0} if isinstance(teacher, str) else teacher


def value_of_task(route: Route, name: str, task: Task) -> str | None:
    """Return the value that all prompts of a task share, or None if rows may differ."""
    if route.by == "task":
        return name
    if route.by != "domain":
        return None
    # Rows of a file may set their domain.
    return task.domain or (name if task.kind is not None else None)


def check_route(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the route that can be found without reading rows."""
    route, teachers = recipe.route, recipe.teachers
    if len(teachers) < 2:
        return
    if route.balance == "shares" and route.shares is None:
        yield RecipeError("route.balance", "shares without route.shares", "route.shares of each teacher")
    if route.balance in ("tokens", "sigma") and route.shares is not None:
        found, advice = f"shares with route.balance {route.balance}", "remove one of the two"
        yield RecipeError("route.shares", found, "route.balance shares or update", advice)
    elif route.shares is not None:
        yield from _shares(route.shares, [name for name in teachers if name not in in_targets(teachers)])
    yield from list(_lost(route, teachers)) or _cover(route, teachers, recipe.tasks)


def _shares(shares: dict[str, float], teachers: Iterable[str]) -> Iterator[RecipeError]:
    missing = [name for name in teachers if name not in shares]
    unknown = [name for name in shares if name not in teachers]
    if missing or unknown:
        parts = [f"no share of {', '.join(missing)}"] if missing else []
        parts += [f"no teacher {', '.join(unknown)}"] if unknown else []
        expected = f"a share of each teacher: {', '.join(teachers)}"
        yield RecipeError("route.shares", " and ".join(parts), expected, _meant(unknown, missing))
        return
    for name, share in shares.items():
        if share <= 0:
            yield RecipeError(
                f"route.shares.{name}", f"{share:g}", "more than 0", "remove teachers without a share"
            )
    total = math.fsum(shares.values())
    if abs(total - 1) > 1e-6:
        found = ", ".join(f"{name}: {share:g}" for name, share in shares.items())
        yield RecipeError("route.shares", f"{{{found}}}, a sum of {total:g}", "a sum of 1")


def _lost(route: Route, teachers: Iterable[str]) -> Iterator[RecipeError]:
    """Yield entries of route.map that name no teacher."""
    known = ", ".join(teachers)
    for value, to in route.map.items():
        path = f"route.map.{value}"
        if not to:
            yield RecipeError(path, "no teacher", f"a teacher, or weights of several: {known}")
        for name, weight in destinations(route, value).items():
            if name and name not in teachers:
                yield RecipeError(path, f"{name!r}", f"one of {known}", _meant([name], teachers))
            elif weight <= 0:
                yield RecipeError(
                    f"{path}.{name}", f"{weight:g}", "more than 0", "remove teachers without a share"
                )


def in_targets(teachers: Mapping[str, Teacher]) -> set[str]:
    """Return the teachers that are part of another one's target or mixture, and so need no prompts."""
    parts = ((name, {**(t.target or {}), **(t.mixture or {})}) for name, t in teachers.items())
    return {part for name, used in parts for part in used if part != name}


def _cover(route: Route, teachers: Mapping[str, Teacher], tasks: dict[str, Task]) -> Iterator[RecipeError]:
    """Yield values without a teacher, and teachers without a value."""
    by = route.by
    builtin = [name for name, task in tasks.items() if task.kind is not None]
    if by not in ("domain", "task") and builtin:
        found = f"the column {by!r}, which the built-in task {builtin[0]} does not have"
        advice = _meant([by], ["domain", "task"]) or "set it to domain or task, or use files only"
        yield RecipeError("route.by", found, "a property of every prompt", advice)
        return
    of_task = {name: value_of_task(route, name, task) for name, task in tasks.items()}
    values = list(dict.fromkeys(value for value in of_task.values() if value is not None))
    for value in values:
        if missing := [name for name in destinations(route, value) if name not in teachers]:
            names = ", ".join(name for name in of_task if of_task[name] == value)
            found = f"no teacher for the {by} {value!r} of {names}"
            expected = f"a teacher named {value}, or an entry of route.map for {value}"
            advice = _meant(missing, teachers) or f"set route.map: {{{value}: {' or '.join(teachers)}}}"
            yield RecipeError("route.map", found, expected, advice)
    if None in of_task.values():  # rows may bring other values
        return
    reached = {name for value in values for name in destinations(route, value)} | in_targets(teachers)
    for name in teachers:
        if name not in reached:
            found = f"a teacher without prompts (by {by}: {', '.join(values)})"
            advice = f"remove it, or map a {by} to it in route.map"
            yield RecipeError(f"teachers.{name}", found, "prompts for each teacher", advice)
    for value in route.map:
        if value not in values:
            advice, expected = _meant([value], values) or "remove it", f"one of {', '.join(values)}"
            yield RecipeError(f"route.map.{value}", f"a {by} that no task has", expected, advice)


def _meant(words: Iterable[str], among: Iterable[str]) -> str:
    names = list(among)
    close = [near for word in words if (near := nearest(word, names))]
    return f"did you mean {close[0]}?" if close else ""
