"""Whole things into bins: what must be on one machine, in as many resources as there are."""

from __future__ import annotations

from collections.abc import Sequence

Amounts = tuple[float, ...]
"""What a thing takes, or a bin has, of each resource."""

TRIES = 20_000
"""Bins tried at most; more than one for each thing is needed only where odd sizes nearly fill the bins."""


def fit(things: Sequence[Amounts], bins: Sequence[Amounts]) -> list[int] | None:
    """The bin of each thing, so that no bin holds more than it has; None if there is no such way.

    Largest first, each into the fullest bin that takes it, and back if that fails later: exact within
    `TRIES`.
    """
    order = sorted(range(len(things)), key=lambda number: things[number], reverse=True)
    left, where, tries = list(bins), [-1] * len(things), 0
    failed: set[tuple[int, tuple[Amounts, ...]]] = set()  # which bin of equals it was does not matter

    def place(at: int) -> bool:
        nonlocal tries
        if at == len(order):
            return True
        state = at, tuple(sorted(left))
        if state in failed:
            return False
        thing, tried = things[order[at]], set()
        for room, number in sorted((room, number) for number, room in enumerate(left) if holds(room, thing)):
            tries += 1
            if room in tried:
                continue
            if tries > TRIES:
                return False
            tried.add(room)
            left[number], where[order[at]] = _minus(room, thing), number
            if _may_hold(left, [things[other] for other in order[at + 1 :]]) and place(at + 1):
                return True
            left[number] = room
        failed.add(state)
        return False

    return where if _may_hold(left, things) and place(0) else None


def holds(room: Amounts, thing: Amounts) -> bool:
    """Whether there is enough of each resource; sums of fractions may be off by their rounding."""
    return all(has + 1e-6 >= wants for has, wants in zip(room, thing, strict=True))


def total(amounts: Sequence[Amounts]) -> Amounts:
    """The sum over each resource."""
    return tuple(map(sum, zip(*amounts, strict=True)))


def _may_hold(rooms: Sequence[Amounts], things: Sequence[Amounts]) -> bool:
    """Whether the sums alone do not rule it out."""
    return not things or (bool(rooms) and holds(total(rooms), total(things)))


def _minus(room: Amounts, thing: Amounts) -> Amounts:
    return tuple(has - wants for has, wants in zip(room, thing, strict=True))
