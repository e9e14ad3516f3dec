"""Which teachers take which prompts, and routes that lead nowhere: no teacher, no prompts, wrong shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from practicum.errors import RecipeError
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.recipe.schema.teacher_sections import Route
from practicum.recipe.text.type_text import nearest


def destinations(route: Route, value: str) -> dict[str, float]:
    """Teachers that take a value, with weights; a value that route.to does not list names its teacher."""
    teacher = route.to.get(value, value)
    return {teacher: 1.0} if isinstance(teacher, str) else teacher


def in_targets(recipe: Recipe) -> set[str]:
    """Return the teachers that are part of another one's target, and so need no prompts."""
    return {part for name, target in recipe.teacher_targets.items() for part in target if part != name}


def value_of_task(route: Route, name: str, task: Task) -> str | None:
    """The value of all of a task's prompts, if it is known without reading rows."""
    if route.by == "task":
        return name
    if route.by != "domain":
        return None
    # Rows of a file may bring a domain of their own.
    return task.domain or (name if task.kind is not None else None)


def values_of_tasks(recipe: Recipe) -> tuple[dict[str, list[str]], bool]:
    """Values that are known without reading rows, each with its tasks; and whether these are all."""
    values: dict[str, list[str]] = {}
    complete = True
    for name, task in recipe.tasks.items():
        value = value_of_task(recipe.route, name, task)
        if value is None:
            complete = False
        else:
            values.setdefault(value, []).append(name)
    return values, complete


def check_route(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the route that is known without reading rows."""
    if len(recipe.teachers) < 2:
        return
    yield from _shares(recipe)
    lost = list(_lost(recipe))
    yield from lost or _cover(recipe)


def _shares(recipe: Recipe) -> Iterator[RecipeError]:
    shares = recipe.route.shares
    if shares is None:
        return
    missing = [name for name in recipe.teachers if name not in {*shares, *in_targets(recipe)}]
    unknown = [name for name in shares if name not in recipe.teachers]
    if missing or unknown:
        parts = [f"no share of {', '.join(missing)}"] if missing else []
        parts += [f"no teacher {', '.join(unknown)}"] if unknown else []
        expected = f"a share of each teacher: {', '.join(recipe.teachers)}"
        yield RecipeError("route.shares", " and ".join(parts), expected, _meant(unknown, missing))
        return
    for name, share in shares.items():
        if share <= 0:
            expected = "a number greater than 0"
            yield RecipeError(f"route.shares.{name}", f"{share:g}", expected, "remove a teacher without one")
    total = math.fsum(shares.values())
    if abs(total - 1) > 1e-6:
        advice = "they are shares of the whole loss"
        yield RecipeError("route.shares", f"a sum of {total:g}", "a sum of 1", advice)


def _lost(recipe: Recipe) -> Iterator[RecipeError]:
    """Entries of route.to that send prompts to nobody."""
    known = ", ".join(recipe.teachers)
    for value, to in recipe.route.to.items():
        path = f"route.to.{value}"
        if not to:
            yield RecipeError(path, "nobody", f"a teacher, or weights of several: {known}")
        for name, weight in destinations(recipe.route, value).items():
            if name and name not in recipe.teachers:
                yield RecipeError(path, f"{name!r}", f"one of {known}", _meant([name], recipe.teachers))
            elif weight <= 0:
                advice = "remove a teacher that gets none"
                yield RecipeError(f"{path}.{name}", f"{weight:g}", "a weight greater than 0", advice)


def _cover(recipe: Recipe) -> Iterator[RecipeError]:
    by, teachers = recipe.route.by, recipe.teachers
    builtin = [name for name, task in recipe.tasks.items() if task.kind is not None]
    if by not in ("domain", "task") and builtin:
        found = f"{by!r}, a column, with the built-in task {builtin[0]}, which has none"
        advice = "set it to domain or task, or take prompts from files only"
        yield RecipeError(
            "route.by", found, "what every prompt has", _meant([by], ["domain", "task"]) or advice
        )
        return
    values, complete = values_of_tasks(recipe)
    for value, tasks in values.items():
        if missing := [name for name in destinations(recipe.route, value) if name not in teachers]:
            yield RecipeError(
                "route.to",
                f"no teacher for the {by} {value!r} of {_named(tasks)}",
                f"a teacher named {value}, or an entry of route.to for {value}",
                _meant(missing, teachers) or f"set route.to: {{{value}: {' or '.join(teachers)}}}",
            )
    if not complete:
        return
    reached = {name for value in values for name in destinations(recipe.route, value)}
    reached |= in_targets(recipe)
    for name in teachers:
        if name not in reached:
            found = f"a teacher that no prompt goes to (by {by}: {', '.join(values)})"
            advice = f"remove it, or let route.to send it the prompts of a {by}"
            yield RecipeError(f"teachers.{name}", found, "prompts for each teacher", advice)
    for value in recipe.route.to:
        if value not in values:
            advice = _meant([value], values) or "remove it"
            yield RecipeError(
                f"route.to.{value}", f"a {by} of no task", f"one of {', '.join(values)}", advice
            )


def _named(tasks: list[str]) -> str:
    return f"{'task' if len(tasks) == 1 else 'tasks'} {', '.join(tasks)}"


def _meant(words: Iterable[str], among: Iterable[str]) -> str:
    names = list(among)
    close = [near for word in words if (near := nearest(word, names))]
    return f"did you mean {close[0]}?" if close else ""
