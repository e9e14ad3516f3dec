"""What a put is packed into: plain values and byte arrays, which Ray moves without copying them twice.

Imports no torch, so that an actor that only hands packs on starts quickly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Bytes = np.ndarray | bytes
"""Raw bytes: an array [n] of uint8 in shared memory, or bytes that travel with a call."""


class PackedTensor(NamedTuple):
    """A tensor of an object field."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class PackedColumn(NamedTuple):
    """A column of a field that is no object: all rows one after the other."""

    trailing: tuple[int, ...]
    data: Bytes


class Pack(NamedTuple):
    """The columns of one put. `lengths` are those of the ragged extents that it has columns of.

    The column of an object field is a list of values in which PackedTensors stand for tensors.
    """

    lengths: dict[str, list[int]]
    columns: dict[str, PackedColumn | list[Any]]

    def only(self, names: set[str]) -> Pack:
        """The pack without the columns that nobody asks for."""
        if len(names) == len(self.columns):
            return self
        return Pack(self.lengths, {name: self.columns[name] for name in self.columns if name in names})
