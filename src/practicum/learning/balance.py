"""Rows over data-parallel ranks: equally many on each, and tokens as even as can be."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence

from practicum.dataplane.padding_rows import PADDING_TOKENS
from practicum.learning.minibatches import Minibatch, largest_first, spread_evenly

Parts = list[list[int]]
"""Rows of each rank."""
Item = tuple[int, int]
"""Tokens of a row, and its place."""


def partition(tokens: Sequence[int], ranks: int) -> Parts:
    """Places of `tokens` for each rank, equally many, with sums as even as can be found quickly.

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


def in_order(count: int, ranks: int) -> Parts:
    """Equally many consecutive places for each rank: what `partition` is compared with."""
    _check_even(count, ranks)
    size = count // ranks
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(ranks)]


def assign_ranks(
    minibatches: Sequence[Minibatch],
    tokens: Sequence[int],
    ranks: int,
    sessions: Sequence[Hashable] | None = None,
) -> list[Parts]:
    """Rows of each rank in each mini-batch, of which `tokens` has those of every row of the batch.

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
    """As `partition`, with sessions whole; rows after those of `sessions` fill up."""
    _check_even(len(tokens), ranks)
    units: dict[Hashable, list[int]] = {}
    for i, session in enumerate(sessions):
        units.setdefault(session, []).append(i)
    groups, room = list(units.values()), len(tokens) // ranks
    rows = [len(group) for group in groups]
    chosen = largest_first([sum(tokens[i] for i in group) for group in groups], ranks, counts=rows, room=room)
    chosen = spread_evenly(rows, ranks) if chosen is None else chosen
    parts = [[i for number in part for i in groups[number]] for part in chosen]
    longest = max(map(len, parts))
    if longest > room:
        raise ValueError(
            f"{len(tokens)} rows with whole sessions can't be cut evenly over {ranks} ranks: one would have "
            f"{longest}. Pad them first"
        )
    spare = list(range(len(sessions), len(tokens)))
    for part in parts:
        missing = room - len(part)
        part += spare[:missing]
        del spare[:missing]
    return [sorted(part) for part in parts]


def step_imbalance(tokens: Sequence[int], assigned: Sequence[Sequence[Sequence[int]]]) -> float | None:
    """Largest sum of tokens over the mean one, over mini-batches; 1 is even, None: there are no tokens.

    At the end of each mini-batch ranks wait for the slowest.
    """
    slowest = mean = 0.0
    for parts in assigned:
        sums = [sum(tokens[row] for row in part) for part in parts]
        slowest += max(sums, default=0)
        mean += sum(sums) / max(len(sums), 1)
    return slowest / mean if mean else None


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
    """One item of each, in loads sorted by size, whose swap comes nearest to closing the gap."""
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
