"""The order of prompts: tasks take turns in a fixed cycle, and epochs are shuffled without stored state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, isqrt, lcm

from practicum.tasks.draws import mix

_MOST_PLACES = 1000
_ROUNDS = 8


class Mixture:
    """Which task a position of the stream belongs to, and which prompt of that task it is."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], seed: int) -> None:
        self.counts = share_places(weights)
        self._pattern = _spread(names, self.counts, seed)
        seen = [0] * len(self.counts)
        self._ranks: list[int] = []
        for task in self._pattern:
            self._ranks.append(seen[task])
            seen[task] += 1

    def place(self, position: int) -> tuple[int, int]:
        """The number of the task at a position, and the index within that task, without gaps."""
        cycle, place = divmod(position, len(self._pattern))
        task = self._pattern[place]
        return task, cycle * self.counts[task] + self._ranks[place]


def share_places(weights: Sequence[float]) -> list[int]:
    """Places of each task in one cycle: exact if at most 1000 places do, else by largest remainder.

    No task is left without a place, however small its weight.
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
    """The cycle: a task's places at equal distances from a seeded start, for balanced batches."""
    slots = []
    for task, (name, count) in enumerate(zip(names, counts, strict=True)):
        start = Fraction(mix(seed, "mixture", name), 1 << 64)
        slots.extend(((rank + start) / count, task) for rank in range(count))
    return [task for _, task in sorted(slots)]


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of range(size) chosen by the key; `permutation[i]` takes constant time.

    A Feistel network on a grid of about size cells (Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002); a result outside range(size) is sent through again until it is inside.
    """

    size: int
    key: tuple[int | str, ...]
    _sides: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.size >= 1
        side = isqrt(self.size - 1) + 1
        object.__setattr__(self, "_sides", (side, -(-self.size // side)))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in range({self.size})")
        index = self._walk(index)
        while index >= self.size:
            index = self._walk(index)
        return index

    def _walk(self, cell: int) -> int:
        """One pass of the network over the whole grid, which may leave range(size)."""
        a, b = self._sides
        right, left = divmod(cell, a)  # left < a, right < b
        for turn in range(_ROUNDS):
            left, right = right, (left + mix(turn, right, *self.key)) % (b if turn % 2 else a)
        return right * a + left
