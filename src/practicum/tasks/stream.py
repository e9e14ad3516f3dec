"""The prompt stream: prompt number n is a pure function of the recipe's tasks, the seed and n.

So resuming is knowing a number, and every prompt says which epoch and row of its task it came from.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from practicum.errors import PracticumError, RecipeError
from practicum.recipe.schema.recipe import Task
from practicum.tasks.builtin import bind
from practicum.tasks.draws import mix
from practicum.tasks.files import FileSource
from practicum.tasks.messages import Content
from practicum.tasks.mixture import Mixture
from practicum.tasks.permutation import Permutation
from practicum.tasks.procedural import BuiltinTask, Example, Split
from practicum.tasks.prompts import Prompt


class Drawn(NamedTuple):
    """What a source gives for an index: content, answer, the file's row, and where it came from."""

    content: Content
    answer: Any
    row: Mapping[str, Any]
    epoch: int
    number: int
    kind: str | None = None
    example: Example | None = None


class Source(Protocol):
    """Prompts of one task by number, without end. `identity` changes when the prompts do."""

    @property
    def identity(self) -> str: ...

    def draw(self, index: int) -> Drawn: ...


@dataclass(frozen=True)
class BuiltinSource:
    """Examples of a built-in task; there is no end to them and so only one epoch."""

    task: BuiltinTask
    seed: int
    split: Split

    @property
    def identity(self) -> str:
        return f"{self.task.kind.name} {self.task.settings.values} {self.split}"

    def draw(self, index: int) -> Drawn:
        example = self.task.example(self.seed, self.split, index)
        kind = self.task.kind
        return Drawn(kind.content(example), example.answer, {}, 0, index, kind.name, example)


@dataclass(frozen=True)
class ShuffledFile:
    """Rows of a file: each once per epoch, every epoch in its own order."""

    name: str
    file: FileSource
    seed: int
    rows: Sequence[int]
    """Rows that are used, in the file's order."""

    @property
    def identity(self) -> str:
        named = f"{self.file.digest} {self.file.prompt_column} {self.file.answer_column}"
        named = f"{named} {self.file.images_column}" if self.file.has_pictures else named
        return named if len(self.rows) == len(self.file) else f"{named} {mix(*self.rows):016x}"

    def draw(self, index: int) -> Drawn:
        epoch, step = divmod(index, len(self.rows))
        place = Permutation(len(self.rows), (self.seed, self.name, epoch))[step]
        return draw_row(self.file, self.rows[place], epoch)


def draw_row(file: FileSource, index: int, epoch: int = 0) -> Drawn:
    """Row `index` of a file as a prompt."""
    row = file.row(index)
    return Drawn(file.content(row), row.get(file.answer_column), row, epoch, index)


def open_file(task: Task, path: str, needs_answer: bool = False) -> FileSource:
    """A file of the task, read by the task's names of columns; its rows are checked once per process."""
    place = Path(path).absolute()
    stamp = (status.st_mtime_ns, status.st_size) if (status := _status(place)) else None
    return _opened(path, str(place), stamp, task.prompt, task.answer, needs_answer, task.images)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


@lru_cache(8)
def _opened(
    path: str,
    place: str,
    stamp: tuple[int, int] | None,
    prompt: str,
    answer: str,
    needs_answer: bool,
    images: str,
) -> FileSource:
    """`place` and `stamp` tell versions of a file apart."""
    return FileSource(path, prompt, answer, needs_answer, images_column=images)


def to_prompt(uid: int, name: str, task: Task, drawn: Drawn) -> Prompt:
    """The prompt of what was drawn. Its domain is the task's, else the row's own, else the name."""
    domain = task.domain or drawn.row.get("domain") or name
    return Prompt(uid, name, str(domain), *drawn)


class PromptStream:
    """Prompts of all tasks, mixed by weight. `take` goes on from `position`."""

    def __init__(self, tasks: Mapping[str, Task], sources: Sequence[Source], seed: int) -> None:
        self._tasks = list(tasks.items())
        self._sources = list(sources)
        assert len(self._tasks) == len(self._sources)
        weights = [task.weight for task in tasks.values()]
        self._mixture = Mixture(list(tasks), weights, seed)
        parts = (f"{n} {t.weight} {s.identity}" for (n, t), s in zip(self._tasks, sources, strict=True))
        self._identity = f"{mix(seed, *parts):016x}"
        self.position = 0

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position; takes the same time wherever that is."""
        task, index = self._mixture.place(position)
        return to_prompt(position, *self._tasks[task], self._sources[task].draw(index))

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts."""
        prompts = [self.prompt(self.position + i) for i in range(n)]
        self.position += n
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs: the position, and a hash of what the prompts depend on."""
        return {"position": self.position, "identity": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved stream was; an error if the prompts are not the same now."""
        if state.get("identity", self._identity) != self._identity:
            raise PracticumError(
                "the prompts are not those of the checkpoint: the seed, a task's weight or "
                f"options, or a file has changed; position {state['position']} is another prompt.\n"
                "  → restore them, or start a new run from the checkpoint's model."
            )
        self.position = int(state["position"])


def make_stream(
    tasks: Mapping[str, Task],
    seed: int,
    split: Split = "train",
    needs_answer: Collection[str] = (),
    left_out: Mapping[str, frozenset[int]] | None = None,
) -> PromptStream:
    """The stream of a recipe's tasks; rows of those named in `needs_answer` must have an answer.

    `left_out` are rows of files that are not used, by path.
    The eval split of a file task is its eval_file; file tasks without one are left out.
    """
    used = tasks if split == "train" else {n: t for n, t in tasks.items() if is_evaluated(t)}
    if not used:
        raise PracticumError(
            "no task can be evaluated: none is built-in or has an eval_file.\n  → set tasks.<name>.eval_file."
        )
    sources = [_source(n, t, seed, split, n in needs_answer, left_out or {}) for n, t in used.items()]
    return PromptStream(used, sources, seed)


def is_evaluated(task: Task) -> bool:
    """Built-in tasks hold out prompts themselves; a file task needs an eval_file."""
    return task.kind is not None or task.eval_file is not None


def eval_prompts(
    tasks: Mapping[str, Task], rows: int, seed: int, left_out: Mapping[str, frozenset[int]] | None = None
) -> list[Prompt]:
    """The fixed evaluation set: up to `rows` distinct prompts of each task, uids counting from 0.

    Built-in tasks give prompts that training never sees (fewer, if their options leave fewer); file
    tasks the first rows of their eval_file; file tasks without one are not evaluated and give none.
    """
    prompts: list[Prompt] = []
    for name, task in tasks.items():
        if task.kind is not None:
            source = BuiltinSource(bind(name, task.kind, task.options), seed, "eval")
            drawn = _distinct(source, rows)
        elif task.eval_file is not None:
            file = open_file(task, task.eval_file)
            used = used_rows(file, task.eval_file, left_out or {})
            drawn = [draw_row(file, index) for index in used[:rows]]
        else:
            continue
        prompts.extend(to_prompt(uid, name, task, one) for uid, one in enumerate(drawn, start=len(prompts)))
    return prompts


def _distinct(source: BuiltinSource, rows: int) -> list[Drawn]:
    """The first `rows` different prompts; fewer if 20 draws for each do not find them."""
    found: dict[str, Drawn] = {}
    for index in range(20 * rows):
        if len(found) == rows:
            break
        drawn = source.draw(index)
        assert drawn.example is not None
        found.setdefault(drawn.example.key, drawn)
    return list(found.values())


def used_rows(file: FileSource, path: str, left_out: Mapping[str, frozenset[int]]) -> Sequence[int]:
    """Rows of a file that prompts are made from."""
    without = left_out.get(path)
    return [i for i in range(len(file)) if i not in without] if without else range(len(file))


def _source(
    name: str,
    task: Task,
    seed: int,
    split: Split,
    needs_answer: bool,
    left_out: Mapping[str, frozenset[int]],
) -> Source:
    if task.kind is not None:
        return BuiltinSource(bind(name, task.kind, task.options), seed, split)
    path = task.file if split == "train" else task.eval_file
    if path is None:
        raise RecipeError(f"tasks.{name}", "neither kind nor file", "one of them")
    file = open_file(task, path, needs_answer)
    return ShuffledFile(name, file, seed, used_rows(file, path, left_out))
