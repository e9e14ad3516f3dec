"""The order of prompts: tasks take turns in a fixed cycle, and each epoch has its own order."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, isqrt, lcm

from practicum.tasks.draws import mix

_MOST_PLACES = 1000
_ROUNDS = 8


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
    """Places of each task in one cycle: exact if at most 1000 places do, else by largest remainder.

    Every task has at least one place.
    """
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
