"""The table of built-in tasks. Cheap to import: no torch, no numpy, no Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from practicum.errors import RecipeError, RecipeErrors
from practicum.tasks.kinds.add import ADD
from practicum.tasks.kinds.colour import COLOUR
from practicum.tasks.kinds.compare import COMPARE
from practicum.tasks.kinds.copy import COPY
from practicum.tasks.kinds.count import COUNT
from practicum.tasks.kinds.countdown import COUNTDOWN
from practicum.tasks.kinds.dots import DOTS
from practicum.tasks.kinds.reverse import REVERSE
from practicum.tasks.kinds.rotate import ROTATE
from practicum.tasks.kinds.sort import SORT
from practicum.tasks.kinds.total import TOTAL
from practicum.tasks.procedural import BuiltinTask, Procedural

TASKS: dict[str, Procedural] = {
    kind.name: kind
    for kind in (COPY, REVERSE, ROTATE, COMPARE, COUNT, SORT, ADD, COUNTDOWN, TOTAL, COLOUR, DOTS)
}
"""By name, roughly from easy to hard; then the one for tools and those on pictures."""


def find_problems(task: str, kind: str, options: Mapping[str, Any]) -> list[RecipeError]:
    """Every mistake in the kind and the options of the recipe's task `task`."""
    if kind not in TASKS:
        near = get_close_matches(kind, TASKS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`practicum tasks` describes them."
        return [RecipeError(f"tasks.{task}.kind", repr(kind), f"one of {', '.join(TASKS)}", hint)]
    return TASKS[kind].settle(task, options)[1]


def bind(task: str, kind: str, options: Mapping[str, Any]) -> BuiltinTask:
    """The built-in task `kind` with these options, named `task` in the recipe; or RecipeErrors."""
    problems = find_problems(task, kind, options)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RecipeErrors(f"tasks.{task}", problems)
    settings, _ = TASKS[kind].settle(task, options)
    return BuiltinTask(task, TASKS[kind], settings)


class TaskDescription(NamedTuple):
    """What `practicum tasks` shows of a kind; `options` maps names to a default and a sentence."""

    name: str
    about: str
    prompt: str
    answer: str
    options: dict[str, str]


def describe_tasks() -> list[TaskDescription]:
    """Every built-in task with an example and its options."""
    described = []
    for name, kind in TASKS.items():
        example = bind(name, name, {}).example(0, "train", 0)
        options = {
            key: f"{list(o.default) if isinstance(o.default, tuple) else o.default}: {o.about}"
            for key, o in kind.options.items()
        }
        described.append(TaskDescription(name, kind.about, str(example), example.answer, options))
    return described
