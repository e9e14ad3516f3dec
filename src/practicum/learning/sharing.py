"""How rows that belong together are shared out into parts of given sizes, with little cutting."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Session = list[int]
"""Rows of one session."""
Group = list[Session]
"""Sessions of one prompt."""
Unit = tuple[int, Group]
"""Sessions that are taken together or not at all, behind the number of their rows."""


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


def shortest_first(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Places of sizes for each part: largest first, each to the part that has least.

    No part gets more than its even share of all and (parts - 1) / parts of the largest.
    """
    shared: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, part = loads[0]
        shared[part].append(i)
        heapq.heapreplace(loads, (load + sizes[i], part))
    return shared


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
