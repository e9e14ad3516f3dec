"""The table of built-in tasks. Cheap to import: no torch, no numpy, no Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from practicum.errors import DataError, RecipeErrors
from practicum.recipe.own_parts import find_part, guarded
from practicum.tasks.draws import Draws
from practicum.tasks.picture_kinds import COLOUR, DOTS
from practicum.tasks.procedural import BuiltinTask, Example, Procedural, Settings
from practicum.tasks.text_kinds import ADD, COMPARE, COPY, COUNT, COUNTDOWN, REVERSE, ROTATE, SORT, TOTAL
from practicum.user_code import short_repr

TASKS: dict[str, Procedural] = {
    kind.name: kind
    for kind in (COPY, REVERSE, ROTATE, COMPARE, COUNT, SORT, ADD, COUNTDOWN, TOTAL, COLOUR, DOTS)
}
"""By name, roughly from easy to hard, then the one for tools and those on images."""


def find_kind(name: str, task: str = "<name>") -> Procedural:
    """Return the kind of this name, built in or the user's own. RecipeError at the task for another name."""
    kind = find_part("task_kind", name, TASKS, path=f"tasks.{task}.kind", of=Procedural)
    return kind if name in TASKS else _guarded(kind, f"tasks.{task}.kind: {name}")


def _guarded(kind: Procedural, what: str) -> Procedural:
    """Return a user's kind whose functions report where they raised, and which makes only examples."""

    def make(draws: Draws, settings: Settings) -> Example:
        example = guarded(kind.make, what)(draws, settings)
        if not isinstance(example, Example) or not all(isinstance(text, str) for text in example[:2]):
            found = f"{what} made {short_repr(example)}"
            raise DataError(f"{found}, expected an Example(prompt, answer) whose prompt and answer are texts")
        return example

    check, demonstrate = guarded(kind.check, what), guarded(kind.demonstrate, what)
    return replace(kind, make=make, check=check, demonstrate=demonstrate)


def bind(task: str, kind: str, options: Mapping[str, Any]) -> BuiltinTask:
    """Return the task `task` of the recipe: a kind with options. RecipeErrors for mistakes in them."""
    builtin = find_kind(kind, task)
    settings, problems = builtin.settle(task, options)
    if problems:
        raise problems[0] if len(problems) == 1 else RecipeErrors(f"tasks.{task}", problems)
    return BuiltinTask(task, kind, builtin, settings)


class TaskDescription(NamedTuple):
    """A kind as `practicum tasks` shows it; `options` maps names to a default and a sentence."""

    name: str
    about: str
    prompt: str
    answer: str
    options: dict[str, str]


def describe_tasks() -> list[TaskDescription]:
    described = []
    for name, kind in TASKS.items():
        example = bind(name, name, {}).example(0, "train", 0)
        options = {
            key: f"{list(o.default) if isinstance(o.default, tuple) else o.default}: {o.about}"
            for key, o in kind.options.items()
        }
        described.append(TaskDescription(name, kind.about, str(example), example.answer, options))
    return described
