"""How a step's batch is cut into optimizer mini-batches and shared over data-parallel ranks.

Real rows are shared out first, as if there were no padding; padding rows then fill the mini-batches up to one
size. So padding decides neither which real rows are learnt from together nor how many steps there are. Ranks
have equally many rows of each mini-batch, with tokens as even as can be.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil

import numpy as np

from practicum.dataplane.padding_rows import PADDING_TOKENS
from practicum.errors import RecipeError

Session = list[int]
"""Rows of one session."""
Group = list[Session]
"""Sessions of one prompt."""
Unit = tuple[int, Group]
"""The number of rows, and the sessions that have them, taken together or not at all."""
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
        """Return the optimizer steps of one pass; each has a real row."""
        return min(self.parts, real_rows) if self.rows is None else ceil(real_rows / self.rows)

    def multiple(self, data_parallel: int) -> int:
        """Return the factor that the number of rows needs, so that ranks share each mini-batch evenly."""
        if self.rows is None:
            return self.parts * data_parallel
        if self.rows % data_parallel:
            more = ceil(self.rows / data_parallel) * data_parallel
            expected = f"a multiple of the {data_parallel} data-parallel ranks"
            raise RecipeError("train.minibatch_rows", str(self.rows), expected, f"Set it to {more}.")
        return self.rows


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rows of one optimizer step, as places in the batch, at least one of them real."""

    real: list[int]
    padding: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """All rows, the real ones first."""
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

    Their real rows differ in number by at most one; prompt groups stay together where that allows it, and
    sessions are cut only where nothing else fits. With `whole_sessions` none is cut, and mini-batches differ
    by at most the rows of the largest. Padding makes them equally large, a multiple of `ranks` that has room
    for whole sessions on each; what is left is in none. Groups are shuffled by (seed, step, epoch); the rows
    of a mini-batch stay in their order.
    """
    names = list(zip(prompts, sessions, strict=True))
    by_prompt: dict[int, dict[int, Session]] = {}
    for row, (prompt, session) in enumerate(names):
        if not padding[row]:
            by_prompt.setdefault(prompt, {}).setdefault(session, []).append(row)
    groups = [list(group.values()) for group in by_prompt.values()]
    real = sum(len(session) for group in groups for session in group)
    steps = cut.steps(real)
    if whole_sessions:
        steps = min(steps, sum(map(len, groups)))
    if steps > 1:
        random = np.random.Generator(np.random.Philox(key=[seed, step * 1_000_003 + epoch]))
        groups = [groups[i] for i in random.permutation(len(groups))]
    sizes = [real // steps + (part < real % steps) for part in range(steps)]
    shared = [sorted(rows) for rows in share(groups, sizes, whole_sessions=whole_sessions) if rows]
    if not shared:
        return []
    needed = max(map(len, shared))
    if whole_sessions:
        needed = max(_even_need([names[row] for row in rows], ranks) for rows in shared)
    spare = [row for row, is_padding in enumerate(padding) if is_padding]
    size = len(prompts) // cut.parts if cut.rows is None else cut.rows
    size = min(size, (real + len(spare)) // len(shared)) // ranks * ranks
    size = max(size, size + ceil((needed - size) / ranks) * ranks)
    minibatches = []
    for real in shared:
        room = max(size - len(real), 0)
        minibatches.append(Minibatch(real, spare[:room]))
        spare = spare[room:]
    return minibatches


def _even_need(sessions: Sequence[Hashable], ranks: int) -> int:
    """Return the rows, with padding, that ranks need to have equally many though no session is cut."""
    sizes = list(Counter(sessions).values())
    return ranks * max(sum(sizes[i] for i in part) for part in spread_evenly(sizes, ranks))


def share(groups: Sequence[Group], sizes: Sequence[int], *, whole_sessions: bool = False) -> list[list[int]]:
    """Return the rows of each part, of exactly these sizes (their sum is the number of rows).

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
    """Return parts of whole groups, filled with whole sessions that fit exactly, and the other sessions."""
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
    """Return places of sizes that add up to the room, early ones by preference; none if no choice does."""
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
    """Return the rows of the units that fit into the room, one after the other, and the other units."""
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
    """Share items as `largest_first`, without a limit of room."""
    shared = largest_first(weights, parts)
    assert shared is not None
    return shared


def partition(tokens: Sequence[int], ranks: int) -> Parts:
    """Return places of `tokens` for each rank, equally many, with sums as even as can be found quickly.

    Longest first to the least loaded rank that has room, then swaps between the heaviest and the lightest
    rank as long as one helps. Where a few rows are very long this is much more even than differencing
    (Karmarkar and Karp 1982) with equal counts, which gives each rank one of any `ranks` rows next in size.
    """
    _check_even(len(tokens), ranks)
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
    """Return the rows of each rank in each mini-batch; `tokens` has those of every row of the batch.

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
    """Share rows as `partition`, with sessions whole; rows after those of `sessions` fill up."""
    _check_even(len(tokens), ranks)
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


def _check_even(count: int, ranks: int) -> None:
    if count % ranks:
        raise ValueError(f"{count} rows can't be cut evenly over {ranks} ranks: pad them to a multiple first")
