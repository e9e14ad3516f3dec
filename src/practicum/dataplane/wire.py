"""How rows of plain values cross between processes: as compact columns. Imports no torch."""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any

_SMALL = 400
"""Fewer bytes are not compressed."""
_PICKLE = b"\x80"
"""The first byte of a pickle, and of nothing that is compressed."""
_INTEGERS = (("b", 7), ("h", 15), ("i", 31), ("q", 63))
"""Codes of arrays, with the bits of a number besides its sign."""
_DISTINCT = 256
"""Most values of a column that has numbers in their place."""


class Rows(list[tuple[Any, ...]]):
    """Rows of plain values, such as keys and tags, all of one length."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rows, (pack_columns(self),)


def _rows(packed: bytes) -> Rows:
    return Rows(zip(*unpack_columns(packed), strict=True))


def shrink(data: bytes) -> bytes:
    """Compress a pickle, if that is worth it."""
    return data if len(data) < _SMALL else zlib.compress(data, 1)


def grow(data: bytes) -> bytes:
    """Return the pickle that `shrink` compressed."""
    return data if data[:1] == _PICKLE else zlib.decompress(data)


def pack_columns(rows: Sequence[tuple[Any, ...]]) -> bytes:
    columns = [_packed(column) for column in zip(*rows, strict=True)]
    return shrink(pickle.dumps((len(rows), columns), protocol=5))


def unpack_columns(packed: bytes) -> list[Sequence[Any]]:
    """Return the columns of packed rows. Values and their types are those of the rows."""
    count, columns = pickle.loads(grow(packed))
    return [_unpacked(column, count) for column in columns]


def _packed(column: Sequence[Any]) -> Any:
    """Return an array, (value,), (values, number of each row's value), a dict of columns, or a list."""
    first = column[0]
    if all(map(is_, column, repeat(first))):  # the usual case, and the fastest test
        return (first,)
    kinds = set(map(type, column))
    if kinds == {int}:
        low, high = min(column), max(column)
        bits = max(high, -low - 1).bit_length()
        code = next((code for code, most in _INTEGERS if bits <= most), None)
        return (first,) if low == high else list(column) if code is None else array(code, column)
    if kinds == {float}:
        floats = array("d", column)
        # Equal bits: 0.0 == -0.0 are two values, and each NaN is one.
        return _numbered(memoryview(floats).cast("B").cast("q").tolist(), column) or floats
    if not kinds - {str, bool, type(None)}:
        return _numbered(column, column) or list(column)
    if kinds == {dict} and len({tuple(row) for row in column}) == 1:
        return {name: _packed([row[name] for row in column]) for name in first}
    return list(column)


def _numbered(names: Sequence[Any], column: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the distinct values and each row's number among them, or None if they are too many."""
    values = dict(zip(names, column, strict=True))
    if len(values) == 1:
        return (column[0],)
    if len(values) > min(_DISTINCT, len(column) // 2):
        return None
    number = {name: i for i, name in enumerate(values)}
    return list(values.values()), bytes(map(number.__getitem__, names))


def _unpacked(column: Any, count: int) -> Sequence[Any]:
    if isinstance(column, dict):
        parts = [_unpacked(part, count) for part in column.values()]
        return [dict(zip(column, row, strict=True)) for row in zip(*parts, strict=True)]
    if not isinstance(column, tuple):
        return column
    if len(column) == 1:
        return [column[0]] * count
    values, numbers = column
    return [values[number] for number in numbers]
