"""How a step's batch is cut into optimizer mini-batches, and how many padding rows that takes.

Real rows are shared out first, as if there were no padding; padding rows then fill the mini-batches up to one
size. So padding decides neither which real rows are learnt from together nor how many steps there are.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, lcm

import numpy as np

from practicum.errors import RecipeError
from practicum.recipe.schema.recipe import Recipe

Session = list[int]
"""Rows of one session."""
Group = list[Session]
"""Sessions of one prompt."""
Unit = tuple[int, Group]
"""The number of rows, and the sessions that have them, taken together or not at all."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a recipe asks for: a number of optimizer steps (`parts`), or of rows in each (`rows`).

    `path` is where the recipe says so.
    """

    parts: int = 1
    rows: int | None = None
    path: str = "train.minibatch_rows"

    def steps(self, real_rows: int) -> int:
        """Optimizer steps of one pass: none would be without a real row."""
        return min(self.parts, real_rows) if self.rows is None else ceil(real_rows / self.rows)

    def multiple(self, data_parallel: int) -> int:
        """What the number of rows must be a multiple of, for mini-batches that each cut evenly over ranks."""
        if self.rows is None:
            return self.parts * data_parallel
        if self.rows % data_parallel:
            more = ceil(self.rows / data_parallel) * data_parallel
            expected = f"a multiple of the {data_parallel} data-parallel ranks"
            raise RecipeError(self.path, str(self.rows), expected, f"Set it to {more}.")
        return self.rows

    def size(self, rows: int) -> int:
        """Rows of a mini-batch, padding and all, of a batch of `rows`."""
        return rows // self.parts if self.rows is None else self.rows


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rows of one optimizer step, as places in the batch; there is a real one in each."""

    real: list[int]
    padding: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """All of them, the real ones first."""
        return self.real + self.padding

    def __len__(self) -> int:
        return len(self.real) + len(self.padding)


def student_cut(recipe: Recipe) -> Cut:
    """How the student's batch is cut."""
    return Cut(recipe.train.minibatches, recipe.train.minibatch_rows)


def critic_cut(recipe: Recipe) -> Cut:
    """How the critic's batch is cut: as the student's, unless the recipe says otherwise."""
    if recipe.critic is None or recipe.critic.minibatch_rows is None:
        return student_cut(recipe)
    return Cut(rows=recipe.critic.minibatch_rows, path="critic.minibatch_rows")


def running_cuts(recipe: Recipe, step: int) -> list[Cut]:
    """The cuts of the updates that this step (from 1 on) really runs."""
    if recipe.critic is None:
        return [student_cut(recipe)]
    if step <= recipe.critic.warmup_steps:
        return [critic_cut(recipe)]
    return [critic_cut(recipe), student_cut(recipe)]


def needed_multiple(data_parallel: int, cuts: Iterable[Cut]) -> int:
    """What the number of rows must be a multiple of, for every one of these cuts."""
    return lcm(data_parallel, *(cut.multiple(data_parallel) for cut in cuts))


def padding_needed(real: int, multiple: int) -> int:
    """Padding rows that bring this many real ones to the multiple."""
    return -real % multiple


def spare_padding(largest: int, steps: int, data_parallel: int) -> int:
    """Further padding rows that level mini-batches and ranks if sessions of `largest` rows stay whole."""
    return steps * largest * data_parallel if largest > 1 else 0


def spread(
    prompts: Sequence[int],
    sessions: Sequence[int],
    padding: Sequence[bool],
    cut: Cut,
    *,
    seed: int,
    step: int,
    epoch: int,
    whole_sessions: bool = False,
    ranks: int = 1,
) -> list[Minibatch]:
    """The mini-batches of one pass over a batch, given each row's prompt, session and whether it is padding.

    Their real rows differ in number by at most one; prompt groups stay together where that allows it, and
    sessions are cut only where nothing else fits. With `whole_sessions` none is cut, and mini-batches differ
    by at most the rows of the largest. Padding makes them equally large, a multiple of `ranks` that has room
    for whole sessions on each; what is left is in none. Groups are shuffled by (seed, step, epoch); the rows
    of a mini-batch stay in their order.
    """
    groups = _group(prompts, sessions, padding)
    real = sum(len(session) for group in groups for session in group)
    steps = cut.steps(real)
    if whole_sessions:
        steps = min(steps, sum(map(len, groups)))
    if steps > 1:
        random = np.random.Generator(np.random.Philox(key=[seed, step * 1_000_003 + epoch]))
        groups = [groups[i] for i in random.permutation(len(groups))]
    parts = share(groups, _even(real, steps), whole_sessions=whole_sessions)
    shared = [sorted(rows) for rows in parts if rows]
    spare = [row for row, is_padding in enumerate(padding) if is_padding]
    needed = max(map(len, shared), default=0)
    if whole_sessions:
        names = list(zip(prompts, sessions, strict=True))
        needed = max((_even_need([names[row] for row in rows], ranks) for rows in shared), default=0)
    return _fill(shared, spare, cut.size(len(prompts)), needed, ranks)


def _group(prompts: Sequence[int], sessions: Sequence[int], padding: Sequence[bool]) -> list[Group]:
    """Real rows by prompt and session, in order of first appearance."""
    groups: dict[int, dict[int, list[int]]] = {}
    for row, (prompt, session, is_padding) in enumerate(zip(prompts, sessions, padding, strict=True)):
        if not is_padding:
            groups.setdefault(prompt, {}).setdefault(session, []).append(row)
    return [list(group.values()) for group in groups.values()]


def _even(rows: int, parts: int) -> list[int]:
    """Sizes of this many parts that differ by at most one."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _up(number: int, multiple: int) -> int:
    return number + -number % multiple


def _even_need(sessions: Sequence[Hashable], ranks: int) -> int:
    """Rows, padding and all, with which ranks have equally many though no session is cut."""
    sizes = list(Counter(sessions).values())
    return ranks * max(sum(sizes[i] for i in part) for part in spread_evenly(sizes, ranks))


def _fill(shared: list[list[int]], spare: list[int], size: int, needed: int, ranks: int) -> list[Minibatch]:
    """Padding rows to the mini-batches, so that all have one size, at least the rows that are needed."""
    if not shared:
        return []
    total = sum(map(len, shared)) + len(spare)
    size = min(size, total // len(shared)) // ranks * ranks
    size = max(size, size + _up(needed - size, ranks))
    minibatches = []
    for real in shared:
        room = max(size - len(real), 0)
        minibatches.append(Minibatch(real, spare[:room]))
        spare = spare[room:]
    return minibatches


def share(groups: Sequence[Group], sizes: Sequence[int], *, whole_sessions: bool = False) -> list[list[int]]:
    """Rows of each part, of exactly these sizes (their sum is the number of rows).

    Groups stay whole if that cuts no session, sessions if they fill the parts; only what is left is cut. With
    `whole_sessions` nothing is, and even sizes become parts that differ by at most the largest session.
    """
    parts, left = _place(groups, [], sizes)
    if left:
        # Whole groups may have been in the way of whole sessions.
        others, still_left = _place([], [session for group in groups for session in group], sizes)
        if not still_left:
            return others
    if whole_sessions:
        _level(parts, sizes, left)
    else:
        _cut(parts, sizes, left)
    return parts


def _place(
    groups: Sequence[Group], sessions: Sequence[Session], sizes: Sequence[int]
) -> tuple[list[list[int]], list[Session]]:
    """Parts of whole groups, filled up with whole sessions where that fits exactly, and what is left."""
    parts: list[list[int]] = []
    units = [(sum(map(len, group)), group) for group in groups]
    for size in sizes:
        rows, units = _take(units, size)
        parts.append(rows)
    left = [*sessions, *(session for _, group in units for session in group)]
    left.sort(key=len, reverse=True)
    for part, size in zip(parts, sizes, strict=True):
        chosen = exact_fit(map(len, left), size - len(part))
        part += [row for i in chosen for row in left[i]]
        for i in reversed(chosen):
            del left[i]
    return parts, left


def exact_fit(sizes: Iterable[int], room: int) -> list[int]:
    """Places of sizes that add up to the room, early ones by preference; none if no choice of them does."""
    if not room:
        return []
    seen: list[int] = []
    reached = [1]  # bit s of reached[i]: some of the first i sizes add up to s
    within = (1 << room + 1) - 1
    for size in sizes:
        seen.append(size)
        reached.append((reached[-1] | reached[-1] << size) & within)
        if reached[-1] >> room:
            break
    else:
        return []
    chosen = []
    for i in range(len(seen) - 1, -1, -1):
        if not reached[i] >> room & 1:
            chosen.append(i)
            room -= seen[i]
    return chosen[::-1]


def _take(units: list[Unit], room: int) -> tuple[list[int], list[Unit]]:
    """Rows of the units that fit into the room, one after the other, and the units that don't."""
    rows: list[int] = []
    rest: list[Unit] = []
    smallest = min((size for size, _ in units), default=0)
    for i, (size, sessions) in enumerate(units):
        if len(rows) + smallest > room:
            return rows, rest + units[i:]
        if len(rows) + size <= room:
            rows += [row for session in sessions for row in session]
        else:
            rest.append((size, sessions))
    return rows, rest


def _level(parts: list[list[int]], sizes: Sequence[int], sessions: Sequence[Session]) -> None:
    """Give each session, largest first, to the shortest part that was not full."""
    pairs = zip(parts, sizes, strict=True)
    lengths = [(len(part), i) for i, (part, size) in enumerate(pairs) if len(part) < size]
    heapq.heapify(lengths)
    for session in sessions:
        _, i = lengths[0]
        parts[i] += session
        heapq.heapreplace(lengths, (len(parts[i]), i))


def _cut(parts: list[list[int]], sizes: Sequence[int], sessions: Sequence[Session]) -> None:
    """Fill the parts with whole sessions as long as one fits, then with the rows of those that don't."""
    units: list[Unit] = [(len(session), [session]) for session in sessions]
    for part, size in zip(parts, sizes, strict=True):
        rows, units = _take(units, size - len(part))
        part += rows
    left = [row for _, (session,) in units for row in session]
    for part, size in zip(parts, sizes, strict=True):
        room = size - len(part)
        part += left[:room]
        left = left[room:]


def largest_first(
    weights: Sequence[int],
    parts: int,
    *,
    counts: Sequence[int] | None = None,
    room: int | None = None,
) -> list[list[int]] | None:
    """Items of each part: heaviest first, each to the lightest part that has room for its count.

    Ties go to the first. `counts` are 1 if unset, `room` is unlimited. None if an item fits nowhere. Without
    room, no part gets more than its even share of all and (parts - 1) / parts of the heaviest item.
    """
    shared: list[list[int]] = [[] for _ in range(parts)]
    used = [0] * parts
    lightest = [(0, part) for part in range(parts)]
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        count, full = 1 if counts is None else counts[i], []
        while lightest and room is not None and used[lightest[0][1]] + count > room:
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        weight, part = lightest[0]
        shared[part].append(i)
        used[part] += count
        heapq.heapreplace(lightest, (weight + weights[i], part))
        if counts is not None:  # a part too full for this item may have room for a later one
            for entry in full:
                heapq.heappush(lightest, entry)
    return shared


def spread_evenly(weights: Sequence[int], parts: int) -> list[list[int]]:
    """As `largest_first` without a limit of room."""
    shared = largest_first(weights, parts)
    assert shared is not None
    return shared
