"""Routes that lead nowhere: values without a teacher, teachers without prompts, shares that do not add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.routing import destinations, values_of_tasks
from practicum.recipe.checks.rules import unread
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.type_text import nearest


def check_route(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the route that is known without reading rows."""
    route, teachers = recipe.route, recipe.teachers
    if not teachers:
        if recipe.distill is None:
            keys = ("by", "to", "shares", "measure_every")
            yield from unread(route, "route", keys, "without teachers", "add teachers, or remove it")
        return
    if len(teachers) == 1:
        why = f"with one teacher, {next(iter(teachers))}"
        advice = "one teacher takes every prompt and has all of the loss: remove it"
        yield from unread(route, "route", ("by", "to", "shares"), why, advice)
        return
    yield from _shares(recipe)
    lost = list(_lost(recipe))
    yield from lost or _cover(recipe)


def _shares(recipe: Recipe) -> Iterator[RecipeError]:
    shares = recipe.route.shares
    if shares is None:
        return
    missing = [name for name in recipe.teachers if name not in shares]
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
