"""A seeded permutation of range(n), computed and not stored: shuffles epochs without state."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt

from practicum.tasks.draws import mix

_ROUNDS = 8


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
