"""The prompt stream: prompt number n is a pure function of the recipe's tasks, the seed and n.

So resuming is knowing a number, and every prompt says which epoch and row of its task it came from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from practicum.errors import DataError, PracticumError, RecipeError
from practicum.recipe.schema.recipe import Task
from practicum.tasks.builtin import bind
from practicum.tasks.draws import mix
from practicum.tasks.hub_datasets import BLOCK, Blocks, load_dataset
from practicum.tasks.locations import Location, eval_location, open_rows, train_location
from practicum.tasks.messages import Content
from practicum.tasks.mixture import Mixture
from practicum.tasks.permutation import Permutation
from practicum.tasks.procedural import BuiltinTask, Example, Split
from practicum.tasks.prompts import Prompt
from practicum.tasks.rows import RowSource
from practicum.user_code import text_of


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
        return Drawn(kind.content(example), example.answer, {}, 0, index, self.task.use, example)


@dataclass(frozen=True)
class ShuffledRows:
    """Rows of files or of a dataset: each once per epoch, every epoch in its own order."""

    name: str
    source: RowSource
    seed: int
    rows: Sequence[int]
    """Rows that are used, in the source's order."""

    @property
    def identity(self) -> str:
        source, reader = self.source, self.source.reader
        named = f"{source.digest} {reader.prompt} {reader.answer}"
        named = f"{named} {reader.images}" if source.has_pictures else named
        return named if len(self.rows) == len(source) else f"{named} {mix(*self.rows):016x}"

    def draw(self, index: int) -> Drawn:
        epoch, step = divmod(index, len(self.rows))
        place = Permutation(len(self.rows), (self.seed, self.name, epoch))[step]
        return draw_row(self.source, self.rows[place], epoch)


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a stream: block by block in the stream's order, the rows of a block in an order of their own.

    A row is checked when it comes up. `head` are the first rows, which were looked at before.
    """

    name: str
    at: Location
    head: RowSource
    seed: int

    @property
    def identity(self) -> str:
        reader = self.head.reader
        return f"{self.at} {self.head.digest} {reader.prompt} {reader.answer} {reader.images} {BLOCK}"

    @cached_property
    def _blocks(self) -> Blocks:
        at = self.at
        assert at.dataset is not None
        return Blocks(load_dataset(self.name, at.dataset, at.subset, at.split, streaming=True))

    @cached_property
    def _map(self) -> Any:
        return self.head.reader.loaded()

    def draw(self, index: int) -> Drawn:
        epoch, step, rows = self._blocks.find(index)
        block, inner = divmod(step, BLOCK)
        place = Permutation(len(rows), (self.seed, self.name, epoch, block))[inner]
        number, reader = block * BLOCK + place, self.head.reader
        where = f"{self.at}, row {number + 1}"
        row = reader.change(self._map, rows[place], where)
        if fault := reader.fault(row):
            raise DataError(f"{where}: {fault}")
        return Drawn(self.head.content(0, row), row.get(reader.answer), row, epoch, number)


def draw_row(source: RowSource, index: int, epoch: int = 0) -> Drawn:
    """Row `index` of a source as a prompt."""
    row = source.row(index)
    return Drawn(source.content(index, row), row.get(source.reader.answer), row, epoch, index)


def to_prompt(uid: int, name: str, task: Task, drawn: Drawn) -> Prompt:
    """The prompt of what was drawn. Its domain is the task's, else the row's own, else the name."""
    domain = task.domain or drawn.row.get("domain") or name
    return Prompt(uid, name, text_of(domain), *drawn)


class PromptStream:
    """Prompts of all tasks, mixed by weight. `take` continues from `position`."""

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
        """Continue where a saved stream was; an error if the prompts are not the same now."""
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
    needs_answer: Collection[str] = (),
    left_out: Mapping[str, frozenset[int]] | None = None,
) -> PromptStream:
    """The stream of a recipe's tasks; rows of those named in `needs_answer` must have an answer.

    `left_out` are rows that are not used, by the text of their location.
    """
    sources = [_source(n, t, seed, n in needs_answer, left_out or {}) for n, t in tasks.items()]
    return PromptStream(tasks, sources, seed)


def eval_prompts(
    tasks: Mapping[str, Task], rows: int, seed: int, left_out: Mapping[str, frozenset[int]] | None = None
) -> list[Prompt]:
    """The fixed evaluation set: up to `rows` distinct prompts of each task, uids counting from 0.

    Built-in tasks give prompts that training never sees (fewer, if their options leave fewer); tasks with
    rows the first of their eval_file or eval_split; those without one are not evaluated and give none.
    """
    prompts: list[Prompt] = []
    for name, task in tasks.items():
        if task.kind is not None:
            source = BuiltinSource(bind(name, task.kind, task.options), seed, "eval")
            drawn = _distinct(source, rows)
        elif (at := eval_location(task)) is not None:
            source = open_rows(name, task, at, at_least=rows)
            used = used_rows(source, left_out or {})
            drawn = [draw_row(source, index) for index in used[:rows]]
        else:
            continue
        prompts.extend(
            to_prompt(uid, name, task, example) for uid, example in enumerate(drawn, start=len(prompts))
        )
    return prompts


def _distinct(source: BuiltinSource, rows: int) -> list[Drawn]:
    """The first `rows` different prompts; fewer if 20 draws for each do not find them."""
    first_of_uid: dict[str, Drawn] = {}
    for index in range(20 * rows):
        if len(first_of_uid) == rows:
            break
        drawn = source.draw(index)
        assert drawn.example is not None
        first_of_uid.setdefault(drawn.example.key, drawn)
    return list(first_of_uid.values())


def used_rows(source: RowSource, left_out: Mapping[str, frozenset[int]]) -> Sequence[int]:
    """Rows that prompts are made from."""
    without = left_out.get(source.name)
    return [i for i in range(len(source)) if i not in without] if without else range(len(source))


def _source(
    name: str, task: Task, seed: int, needs_answer: bool, left_out: Mapping[str, frozenset[int]]
) -> Source:
    if task.kind is not None:
        return BuiltinSource(bind(name, task.kind, task.options), seed, "train")
    at = train_location(task)
    if at is None:
        raise RecipeError(f"tasks.{name}", "neither kind nor file nor dataset", "one of them")
    source = open_rows(name, task, at, needs_answer)
    if at.streaming:
        return StreamedRows(name, at, source, seed)
    return ShuffledRows(name, source, seed, used_rows(source, left_out))
