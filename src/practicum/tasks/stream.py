"""The prompt stream: prompt n is a pure function of the recipe's tasks, the seed and n.

Resuming needs only a position, and every prompt names the epoch and row of its task. Tasks take turns in a
fixed cycle (`Mixture`), and each epoch of rows has its own order (`shuffled`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt, lcm
from typing import Any, Protocol

from practicum.errors import PracticumError, RecipeError
from practicum.recipe.schema.recipe import Task
from practicum.tasks.builtin import bind
from practicum.tasks.draws import mix
from practicum.tasks.procedural import BuiltinTask, Split
from practicum.tasks.prompts import Prompt
from practicum.tasks.rows import IMAGES, RowSource, open_rows
from practicum.tasks.tables import eval_location, train_location

LeftOut = Mapping[str, frozenset[int]]
"""Skipped rows by location."""
_MOST_PLACES = 1000
_ROUNDS = 8


class Source(Protocol):
    """An infinite sequence of prompts of a task. `identity` changes when the prompts do."""

    @property
    def identity(self) -> str: ...

    def draw(self, uid: int, index: int) -> Prompt: ...


@dataclass(frozen=True)
class BuiltinSource:
    """Examples of a built-in task, an infinite single epoch."""

    task: BuiltinTask
    domain: str | None
    seed: int
    split: Split

    @property
    def identity(self) -> str:
        return f"{self.task.kind.name} {self.task.settings.values} {self.split}"

    def draw(self, uid: int, index: int) -> Prompt:
        example, task = self.task.example(self.seed, self.split, index), self.task
        content, domain = task.kind.content(example), self.domain or task.name
        return Prompt(uid, task.name, domain, content, example.answer, {}, 0, index, task.use, example)


@dataclass(frozen=True)
class ShuffledRows:
    """Rows of files or a dataset: each once per epoch, shuffled differently in each epoch."""

    source: RowSource
    seed: int
    rows: Sequence[int]
    """Rows in use, in the source's order."""

    @property
    def identity(self) -> str:
        source, reader = self.source, self.source.reader
        named = f"{source.digest} {reader.prompt} {reader.answer}"
        named = f"{named} {IMAGES}" if source.has_pictures else named
        return named if len(self.rows) == len(source) else f"{named} {mix(*self.rows):016x}"

    def draw(self, uid: int, index: int) -> Prompt:
        epoch, step = divmod(index, len(self.rows))
        place = shuffled(step, len(self.rows), self.seed, self.source.reader.task, epoch)
        return self.source.prompt(uid, self.rows[int(place)], epoch)


class PromptStream:
    """Prompts of all tasks, mixed by weight. `take` continues from `position`."""

    def __init__(self, tasks: Mapping[str, Task], sources: Sequence[Source], seed: int) -> None:
        self._sources, self.position = list(sources), 0
        self._mixture = Mixture(list(tasks), [task.weight for task in tasks.values()], seed)
        pairs = zip(tasks.items(), sources, strict=True)
        parts = (f"{name} {task.weight} {source.identity}" for (name, task), source in pairs)
        self._identity = f"{mix(seed, *parts):016x}"

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position, in constant time."""
        task, index = self._mixture.place(position)
        return self._sources[task].draw(position, index)

    def take(self, n: int) -> list[Prompt]:
        prompts = [self.prompt(self.position + i) for i in range(n)]
        self.position += n
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and a hash of everything that the prompts depend on."""
        return {"position": self.position, "identity": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raise PracticumError if the prompts have changed."""
        if state.get("identity", self._identity) != self._identity:
            raise PracticumError(
                "the prompts differ from the checkpoint's: the seed, a task's weight or options, or a "
                f"file has changed, so position {state['position']} is another prompt.\n"
                "  → restore them, or start a new run from the checkpoint's model."
            )
        self.position = int(state["position"])


def make_stream(
    tasks: Mapping[str, Task], seed: int, needs_answer: Collection[str] = (), left_out: LeftOut | None = None
) -> PromptStream:
    """Return the stream of a recipe's tasks. Rows of tasks in `needs_answer` must have an answer."""
    sources: list[Source] = []
    for name, task in tasks.items():
        if task.kind is not None:
            sources.append(BuiltinSource(bind(name, task.kind, task.options), task.domain, seed, "train"))
            continue
        at = train_location(task)
        if at is None:
            raise RecipeError(f"tasks.{name}", "neither kind nor file nor dataset", "one of them")
        rows = open_rows(name, task, at, name in needs_answer)
        sources.append(ShuffledRows(rows, seed, used_rows(rows, left_out or {})))
    return PromptStream(tasks, sources, seed)


def eval_prompts(
    tasks: Mapping[str, Task], rows: int, seed: int, left_out: LeftOut | None = None
) -> list[Prompt]:
    """Return the fixed evaluation set: up to `rows` distinct prompts of each task, with uids from 0.

    Built-in tasks use prompts that are never trained on. Tasks with rows use the first ones of eval_file or
    eval_split, if set.
    """
    prompts: list[Prompt] = []
    for name, task in tasks.items():
        if task.kind is not None:
            source = BuiltinSource(bind(name, task.kind, task.options), task.domain, seed, "eval")
            indices = _distinct(source, rows)
            prompts += [source.draw(uid, index) for uid, index in enumerate(indices, start=len(prompts))]
        elif (at := eval_location(task)) is not None:
            source = open_rows(name, task, at)
            indices = used_rows(source, left_out or {})[:rows]
            prompts += [source.prompt(uid, index) for uid, index in enumerate(indices, start=len(prompts))]
    return prompts


def _distinct(source: BuiltinSource, rows: int) -> list[int]:
    """Return the first `rows` distinct prompts, or fewer if 20 × `rows` draws do not find them."""
    first_of_key: dict[str, int] = {}
    for index in range(20 * rows):
        if len(first_of_key) == rows:
            break
        first_of_key.setdefault(source.task.example(source.seed, source.split, index).key, index)
    return list(first_of_key.values())


def used_rows(source: RowSource, left_out: LeftOut) -> Sequence[int]:
    without = left_out.get(source.name)
    return [i for i in range(len(source)) if i not in without] if without else range(len(source))


class Mixture:
    """Maps a position of the stream to a task and a prompt of that task."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int) -> None:
        self.counts = share_places(weights)
        self._pattern = _spread(names, self.counts, seed)
        seen = [0] * len(self.counts)
        self._ranks: list[int] = []
        for task in self._pattern:
            self._ranks.append(seen[task])
            seen[task] += 1

    def place(self, position: int) -> tuple[int, int]:
        """Return the number of the task at a position, and the index within the task, without gaps."""
        cycle, place = divmod(position, len(self._pattern))
        task = self._pattern[place]
        return task, cycle * self.counts[task] + self._ranks[place]


def share_places(weights: Sequence[float]) -> list[int]:
    """Return each task's places in one cycle: exact if at most 1000 do, else by largest remainder."""
    exact = [Fraction(str(weight)) for weight in weights]
    unit = lcm(*(share.denominator for share in exact))
    whole = [int(share * unit) for share in exact]
    whole = [count // gcd(*whole) for count in whole]
    if sum(whole) <= _MOST_PLACES:
        return whole
    places = max(_MOST_PLACES, len(weights))
    exact_places = [share * places / sum(exact) for share in exact]
    counts = [max(1, int(share)) for share in exact_places]
    while (missing := places - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        movable = [i for i, count in enumerate(counts) if step > 0 or count > 1]
        furthest = max(movable, key=lambda i: step * (exact_places[i] - counts[i]))
        counts[furthest] += step
    return counts


def _spread(names: Sequence[str], counts: Sequence[int], seed: int) -> list[int]:
    """Return a cycle with each task's places at equal distances from a seeded start, for balanced batches."""
    slots = []
    for task, (name, count) in enumerate(zip(names, counts, strict=True)):
        start = Fraction(mix(seed, "mixture", name), 1 << 64)
        slots.extend(((rank + start) / count, task) for rank in range(count))
    return [task for _, task in sorted(slots)]


def shuffled(index: int, size: int, *key: int | str) -> int:
    """Return the item at `index` of range(size) in an order that the key chooses, in constant time.

    A Feistel network on a grid of about size cells (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). A result outside range(size) is sent through again until it is inside.
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        right, left = divmod(index, a)  # left < a, right < b
        for turn in range(_ROUNDS):
            left, right = right, (left + mix(turn, right, *key)) % (b if turn % 2 else a)
        index = right * a + left
        if index < size:
            return index
