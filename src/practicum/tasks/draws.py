"""Random numbers as a pure function of a key: no state to save, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")
_BLOCK_BITS = 512
_SPARE_BITS = 64  # keeps the bias of a draw below 2**-64


def mix(*key: int | str) -> int:
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")


class Draws:
    """A sequence of random numbers that depends on the key only."""

    __slots__ = ("_bits", "_block", "_key", "_pool")

    def __init__(self, *key: int | str) -> None:
        self._key = repr(key).encode()
        self._block, self._pool, self._bits = 0, 0, 0

    def below(self, n: int) -> int:
        """Uniform in 0 .. n-1."""
        bits = n.bit_length()
        if self._bits < bits + _SPARE_BITS:
            assert bits + _SPARE_BITS <= _BLOCK_BITS, "draw such a number in parts"
            salt = self._block.to_bytes(8, "little")
            self._pool = int.from_bytes(blake2b(self._key, salt=salt).digest(), "little")
            self._block += 1
            self._bits = _BLOCK_BITS
        self._bits -= bits
        self._pool, drawn = divmod(self._pool, n)
        return drawn

    def between(self, low: int, high: int) -> int:
        """Uniform in low .. high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def text(self, alphabet: str, length: int) -> str:
        n = len(alphabet)
        return "".join([alphabet[self.below(n)] for _ in range(length)])

    def number(self, digits: int) -> int:
        """A number of exactly that many digits (0 to 9 for one)."""
        return self.below(10) if digits == 1 else self.between(10 ** (digits - 1), 10**digits - 1)
