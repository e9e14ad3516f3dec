"""Cut a step's batch into optimizer mini-batches, and divide these among data-parallel ranks.

Real rows are assigned first, ignoring padding. Padding rows then fill mini-batches to equal size. So padding
does not change which real rows are trained on together, or the number of steps. Ranks have equal numbers of
rows of each mini-batch, with balanced tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import ceil

import numpy as np

from practicum.dataplane.columns import PADDING_TOKENS
from practicum.errors import RecipeError

Parts = list[list[int]]
"""Rows of each rank."""
Item = tuple[int, int]
"""Tokens of a row, and its place."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The recipe's number of optimizer steps (`parts`), or of rows in each (`rows`)."""

    parts: int = 1
    rows: int | None = None

    def steps(self, real_rows: int) -> int:
        """Return the optimizer steps of one pass. Each has a real row."""
        return min(self.parts, real_rows) if self.rows is None else ceil(real_rows / self.rows)

    def multiple(self, data_parallel: int) -> int:
        """Return the factor that the number of rows needs, so that ranks share each mini-batch evenly."""
        if self.rows is None:
            return self.parts * data_parallel
        if self.rows % data_parallel:
            more = ceil(self.rows / data_parallel) * data_parallel
            expected = f"a multiple of the {data_parallel} data-parallel ranks"
            raise RecipeError("train.minibatch_size", str(self.rows), expected, f"set it to {more}")
        return self.rows


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rows of one optimizer step, as places in the batch, at least one of them real."""

    real: list[int]
    padding: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        return self.real + self.padding


def spare_padding(largest: int, steps: int, data_parallel: int) -> int:
    """Return further padding rows that level mini-batches and ranks if sessions stay whole."""
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
    """Return the mini-batches of one pass over a batch with these prompts, sessions and padding rows.

    Prompt groups follow one another, shuffled by (seed, step, epoch), and are cut where a mini-batch is full:
    real rows differ in number by at most one. With `whole_sessions` each session is where its middle would
    be, which adds at most the rows of the largest. Padding makes mini-batches equally large, a multiple of
    `ranks` that has room for whole sessions on each. Remaining rows are in none. Rows stay in order.
    """
    names = list(zip(prompts, sessions, strict=True))
    by_prompt: dict[int, dict[int, list[int]]] = {}
    for row, (prompt, session) in enumerate(names):
        if not padding[row]:
            by_prompt.setdefault(prompt, {}).setdefault(session, []).append(row)
    groups = [list(group.values()) for group in by_prompt.values()]
    real = len(padding) - sum(padding)
    steps = cut.steps(real)
    if whole_sessions:
        steps = min(steps, sum(map(len, groups)))
    if not steps:
        return []
    if steps > 1:
        random = np.random.Generator(np.random.Philox(key=[seed, step * 1_000_003 + epoch]))
        groups = [groups[i] for i in random.permutation(len(groups))]
    units = [session for group in groups for session in group]
    if not whole_sessions:
        units = [[row] for session in units for row in session]
    ends = list(accumulate(real // steps + (part < real % steps) for part in range(steps)))
    parts: Parts = [[] for _ in ends]
    placed = 0
    for unit in units:
        parts[bisect_right(ends, placed + (len(unit) - 1) / 2)] += unit
        placed += len(unit)
    shared = [sorted(rows) for rows in parts if rows]
    needed = max(map(len, shared))
    if whole_sessions:  # ranks need equally many rows, though no session is cut
        counts = [[*Counter(names[row] for row in rows).values()] for rows in shared]
        needed = ranks * max(sum(c[i] for i in part) for c in counts for part in spread_evenly(c, ranks))
    spare = [row for row, is_padding in enumerate(padding) if is_padding]
    size = len(prompts) // cut.parts if cut.rows is None else cut.rows
    size = min(size, (real + len(spare)) // len(shared)) // ranks * ranks
    size = max(size, size + ceil((needed - size) / ranks) * ranks)
    minibatches = []
    for rows in shared:
        room = max(size - len(rows), 0)
        minibatches.append(Minibatch(rows, spare[:room]))
        spare = spare[room:]
    return minibatches


def largest_first(
    weights: Sequence[int], parts: int, *, counts: Sequence[int] | None = None, room: int | None = None
) -> list[list[int]] | None:
    """Return the items of each part: heaviest first, each to the lightest part that has room for its count.

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
    """Distribute items as `largest_first` does, without a limit per rank."""
    shared = largest_first(weights, parts)
    assert shared is not None
    return shared


def partition(tokens: Sequence[int], ranks: int) -> Parts:
    """Return places of `tokens` for each rank, equally many, with sums as even as can be found quickly.

    Longest first to the least loaded rank that has room, then swaps between the heaviest and the lightest
    rank as long as one helps. Where a few rows are very long this is much more even than differencing
    (Karmarkar and Karp 1982) with equal counts, which gives each rank one of any `ranks` rows next in size.
    """
    if len(tokens) % ranks:
        raise ValueError(f"{len(tokens)} rows can't be cut evenly over {ranks} ranks: pad them first")
    parts = largest_first(tokens, ranks, room=len(tokens) // ranks)
    assert parts is not None, "each rank has room for its even share"
    loads = [[(tokens[i], i) for i in part] for part in parts]
    _swap(loads)
    return [sorted(i for _, i in load) for load in loads]


def assign_ranks(
    minibatches: Sequence[Minibatch],
    tokens: Sequence[int],
    ranks: int,
    sessions: Sequence[Hashable] | None = None,
) -> list[Parts]:
    """Return the rows of each rank in each mini-batch. `tokens` has those of every row of the batch.

    With fewer real rows than ranks, some ranks have padding alone. Given `sessions`, that of every row of the
    batch, no session is cut.
    """
    assigned = []
    for minibatch in minibatches:
        rows = minibatch.rows
        sizes = [tokens[row] for row in minibatch.real] + [PADDING_TOKENS] * len(minibatch.padding)
        together = None if sessions is None else [sessions[row] for row in minibatch.real]
        if together is None or len(set(together)) == len(together):
            parts = partition(sizes, ranks)
        else:
            parts = _keep_sessions(sizes, together, ranks)
        assigned.append([[rows[i] for i in part] for part in parts])
    return assigned


def _keep_sessions(tokens: Sequence[int], sessions: Sequence[Hashable], ranks: int) -> Parts:
    """Share rows as `partition`, with sessions whole. Rows after those of `sessions` fill up."""
    units: dict[Hashable, list[int]] = {}
    for i, session in enumerate(sessions):
        units.setdefault(session, []).append(i)
    groups, room = list(units.values()), len(tokens) // ranks
    rows = [len(group) for group in groups]
    chosen = largest_first([sum(tokens[i] for i in group) for group in groups], ranks, counts=rows, room=room)
    chosen = spread_evenly(rows, ranks) if chosen is None else chosen
    parts = [[i for number in part for i in groups[number]] for part in chosen]
    if max(map(len, parts)) > room:
        raise ValueError(f"{ranks} ranks can't share {len(tokens)} rows with whole sessions: pad them first")
    spare = iter(range(len(sessions), len(tokens)))
    return [sorted([*part, *islice(spare, room - len(part))]) for part in parts]


def _swap(loads: list[list[Item]]) -> None:
    """Swap items of the heaviest and the lightest rank in place, until none brings the two nearer."""
    for load in loads:
        load.sort()
    sums = [sum(size for size, _ in load) for load in loads]
    while True:
        heavy, light = sums.index(max(sums)), sums.index(min(sums))
        pair = _best_pair(loads[heavy], loads[light], sums[heavy] - sums[light])
        if pair is None:
            return
        more, less = pair
        for load, out, into in ((loads[heavy], more, less), (loads[light], less, more)):
            del load[bisect_left(load, out)]
            insort(load, into)
        sums[heavy] -= more[0] - less[0]
        sums[light] += more[0] - less[0]


def _best_pair(heavy: list[Item], light: list[Item], gap: int) -> tuple[Item, Item] | None:
    """Return one item of each, in loads sorted by size, whose swap comes nearest to closing the gap."""
    best, pair = gap, None
    for item in heavy:
        at = bisect_left(light, (item[0] - gap / 2, -1))
        for other in light[max(at - 1, 0) : at + 1]:
            left = abs(gap - 2 * (item[0] - other[0]))
            if left < best:
                best, pair = left, (item, other)
    return pair
