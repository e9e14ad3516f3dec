"""Whole things into bins: what must be on one machine, in as many resources as there are."""

from __future__ import annotations

from collections.abc import Sequence

Amounts = tuple[float, ...]
"""What a thing takes, or a bin has, of each resource."""

TRIES = 20_000
"""Bins tried at most; more than one for each thing is needed only where odd sizes nearly fill the bins."""


def fit(things: Sequence[Amounts], bins: Sequence[Amounts]) -> list[int] | None:
    """The bin of each thing, so that no bin holds more than it has; None if there is no way.

    Largest first, each into the fullest bin that has room, and back if that fails: exact within `TRIES`.
    """
    order = sorted(range(len(things)), key=lambda number: things[number], reverse=True)
    free, where, tries = list(bins), [-1] * len(things), 0

    def place(at: int) -> bool:
        nonlocal tries
        if at == len(order):
            return True
        thing = things[order[at]]
        for room in sorted({room for room in free if _holds(room, thing)}):  # equal bins are tried once
            tries += 1
            if tries > TRIES:
                return False
            number = free.index(room)
            where[order[at]] = number
            free[number] = tuple(has - takes for has, takes in zip(room, thing, strict=True))
            if place(at + 1):
                return True
            free[number] = room
        return False

    enough = not things or (bool(bins) and _holds(total(bins), total(things)))
    return where if enough and place(0) else None


def total(amounts: Sequence[Amounts]) -> Amounts:
    """The sum of each resource."""
    return tuple(map(sum, zip(*amounts, strict=True)))


def _holds(room: Amounts, thing: Amounts) -> bool:
    """Whether there is enough of each resource; sums of fractions may be off by their rounding."""
    return all(has + 1e-6 >= takes for has, takes in zip(room, thing, strict=True))
