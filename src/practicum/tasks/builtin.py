"""The table of built-in tasks. Cheap to import: no torch, no numpy, no Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from practicum.errors import DataError, RecipeError, RecipeErrors
from practicum.recipe.own_parts import find_part, guarded
from practicum.tasks.draws import Draws
from practicum.tasks.kinds.colour import COLOUR
from practicum.tasks.kinds.dots import DOTS
from practicum.tasks.kinds.letters import COPY, COUNT, REVERSE, ROTATE
from practicum.tasks.kinds.numbers import ADD, COMPARE, COUNTDOWN, SORT
from practicum.tasks.kinds.total import TOTAL
from practicum.tasks.procedural import BuiltinTask, Example, Procedural, Settings
from practicum.user_code import lone_surrogate, repr_of

TASKS: dict[str, Procedural] = {
    kind.name: kind
    for kind in (COPY, REVERSE, ROTATE, COMPARE, COUNT, SORT, ADD, COUNTDOWN, TOTAL, COLOUR, DOTS)
}
"""By name, roughly from easy to hard; then the one for tools and those on pictures."""


def find_kind(name: str, task: str = "<name>") -> Procedural:
    """The kind of this name, built in or the user's own; a RecipeError at the task if there is none."""
    kind = find_part("task_kind", name, TASKS, path=f"tasks.{task}.kind", of=Procedural)
    return kind if name in TASKS else _guarded(kind, f"tasks.{task}.kind: {name}")


def _guarded(kind: Procedural, what: str) -> Procedural:
    """A kind of the user's whose functions say where they raised, and which makes only examples."""

    def make(draws: Draws, settings: Settings) -> Example:
        example = guarded(kind.make, what)(draws, settings)
        if not issubclass(type(example), Example) or not all(type(text) is str for text in example[:2]):
            found = f"{what} made {repr_of(example)}"
            raise DataError(f"{found}, expected an Example(prompt, answer) whose prompt and answer are texts")
        if broken := lone_surrogate(example.prompt) or lone_surrogate(example.answer):
            raise DataError(f"{what} made {repr_of(example)}: {broken}, which no tokenizer takes")
        return example

    check, demonstrate = guarded(kind.check, what), guarded(kind.demonstrate, what)
    return replace(kind, make=make, check=check, demonstrate=demonstrate)


def find_problems(task: str, kind: str, options: Mapping[str, Any]) -> list[RecipeError]:
    """Every mistake in the kind and the options of the recipe's task `task`."""
    try:
        return find_kind(kind, task).settle(task, options)[1]
    except RecipeError as problem:
        return [problem]


def bind(task: str, kind: str, options: Mapping[str, Any]) -> BuiltinTask:
    """The built-in task `kind` with these options, named `task` in the recipe; or RecipeErrors."""
    problems = find_problems(task, kind, options)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RecipeErrors(f"tasks.{task}", problems)
    builtin = find_kind(kind, task)
    return BuiltinTask(task, kind, builtin, builtin.settle(task, options)[0])


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
