"""Columns into packs and back: one copy on the way in, none on the way out where rows lie together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from practicum.dataplane.check_columns import dtype_of
from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.ray_store.row_locations import ColumnLocations, Pack, PackedColumn, PackedTensor
from practicum.errors import StoreError

Run = tuple[int, int, int]
"""Consecutive rows of one put: its number, the first row, and the one after the last."""


def pack_columns(columns: Mapping[str, Column], spans: Mapping[str, list[int]]) -> Pack:
    """Checked columns as bytes; those that lie packed in memory already are not copied."""
    packed: dict[str, PackedColumn | list[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, list):
            packed[name] = _pack_tensors(name, column)
        else:
            values = column.values if isinstance(column, Ragged) else column
            packed[name] = PackedColumn(tuple(values.shape[1:]), _bytes_of(values))
    return Pack(dict(spans), packed)


def pack_bytes(pack: Pack) -> int:
    """Bytes of tensors in a pack."""
    return _count(pack.columns)


def inline(pack: Pack) -> Pack:
    """The pack with bytes in place of arrays, which are quicker to send if they are few."""
    return pack._replace(columns=_map_leaves(pack.columns, _with_bytes))


def read_columns(locations: ColumnLocations, packs: Sequence[Pack]) -> dict[str, Column]:
    """The columns that were located, in their rows' order; views if they lie in one piece."""
    opened = [OpenPack(pack) for pack in packs]
    columns: dict[str, Column] = {}
    for names, puts, at in locations.groups:
        runs = _runs(puts, at)
        lengths: dict[str, list[int]] = {}
        for field in map(FIELDS.__getitem__, names):
            extent = field.extent
            if extent == "object":
                parts = (opened[put].objects(field, i, j) for put, i, j in runs)
                columns[field.name] = list(chain.from_iterable(parts))
            elif extent == "scalar":
                columns[field.name] = _join(field, _pieces(field, opened, runs), len(at))
            else:
                if extent not in lengths:
                    cut = (opened[put].pack.lengths[extent][i:j] for put, i, j in runs)
                    lengths[extent] = list(chain.from_iterable(cut))
                values = _join(field, _pieces(field, opened, runs), sum(lengths[extent]))
                columns[field.name] = Ragged.packed(values, lengths[extent])
    return columns


class _Table(NamedTuple):
    """A column with the byte at which each row begins, and the last one ends."""

    trailing: tuple[int, ...]
    data: np.ndarray
    begins: Sequence[int]

    def rows(self, first: int, end: int) -> PackedColumn:
        """Rows first … end - 1."""
        return PackedColumn(self.trailing, self.data[self.begins[first] : self.begins[end]])


class OpenPack:
    """A pack that is being read; what it gives shares memory with the pack."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._begins: dict[tuple[str, int], Sequence[int]] = {}

    def table(self, field: Field) -> _Table:
        """A field that is no object, ready to be cut."""
        column = self.pack.columns[field.name]
        assert isinstance(column, PackedColumn)
        data = np.frombuffer(column.data, np.uint8) if isinstance(column.data, bytes) else column.data
        size = dtype_of(field).itemsize * prod(column.trailing)
        if field.extent == "scalar":
            return _Table(column.trailing, data, range(0, len(data) + size, size))
        begins = self._begins.get((field.extent, size))
        if begins is None:
            lengths = self.pack.lengths[field.extent]
            begins = self._begins[field.extent, size] = [0, *accumulate(n * size for n in lengths)]
        return _Table(column.trailing, data, begins)

    def piece(self, field: Field, first: int, end: int) -> PackedColumn:
        """The bytes of rows first … end - 1 of a field that is no object."""
        return self.table(field).rows(first, end)

    def objects(self, field: Field, first: int, end: int) -> list[Any]:
        """Values of rows first … end - 1 of an object field."""
        column = self.pack.columns[field.name]
        assert isinstance(column, list)
        return _map_leaves(column[first:end], _unpacked)


def _runs(puts: Sequence[int], at: Sequence[int]) -> list[Run]:
    """Rows that follow each other in one put, taken together."""
    runs: list[Run] = []
    put, first, end = -1, 0, 0
    for number, row in zip(puts, at, strict=True):
        if number == put and row == end:
            end += 1
            continue
        if put >= 0:
            runs.append((put, first, end))
        put, first, end = number, row, row + 1
    runs.append((put, first, end))
    return runs


def _pieces(field: Field, opened: Sequence[OpenPack], runs: Sequence[Run]) -> list[PackedColumn]:
    tables = {put: opened[put].table(field) for put in {put for put, _, _ in runs}}
    return [tables[put].rows(first, end) for put, first, end in runs]


def _join(field: Field, pieces: Sequence[PackedColumn], count: int) -> Tensor:
    """Pieces with `count` values in all, joined: a single one is a view, several are copied once."""
    widths = {piece.trailing for piece in pieces}
    if len(widths) > 1:
        raise StoreError(f"{field.name} was put in several widths, {sorted(widths)}: get those apart")
    parts = [np.asarray(piece.data) for piece in pieces]
    data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return _tensor(data, dtype_of(field), (count, *widths.pop()))


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A plain value with each part that is no dict, list or tuple changed."""
    if type(value) is dict:
        return {key: _map_leaves(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(item, change) for item in value)
    return change(value)


def _pack_tensors(name: str, values: list[Any]) -> list[Any]:
    """Values of an object field with their tensors packed; one that is in them twice is packed once."""
    seen: dict[int, PackedTensor] = {}

    def pack(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided or value.is_quantized:
            raise StoreError(f"{name} holds a {value.layout} tensor; this store takes dense ones only")
        if id(value) not in seen:
            dtype = str(value.dtype).removeprefix("torch.")
            seen[id(value)] = PackedTensor(dtype, tuple(value.shape), _bytes_of(value))
        return seen[id(value)]

    return _map_leaves(values, pack)


def _unpacked(value: Any) -> Any:
    if type(value) is not PackedTensor:
        return value
    return _tensor(np.frombuffer(value.data, np.uint8), getattr(torch, value.dtype), value.shape)


def _with_bytes(value: Any) -> Any:
    packed = type(value) in (PackedColumn, PackedTensor)
    return value._replace(data=bytes(value.data)) if packed else value


def _count(value: Any) -> int:
    if type(value) in (PackedColumn, PackedTensor):
        return len(value.data)
    if type(value) is dict:
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if type(value) in (list, tuple) else 0


def _bytes_of(tensor: Tensor) -> np.ndarray:
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.stride() != (1,):  # a single value may have any stride, and still counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


class _Shared:
    """Memory of an array that may not be written to, as numpy takes it without that mark.

    torch warns of arrays that are read-only, and has no tensors that are. Nobody changes what comes
    from a store, so the mark is left off rather than the bytes copied.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory
        where, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (where, False)}


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes as a tensor, without copying them."""
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    writable = data if data.flags.writeable else np.asarray(_Shared(data))
    return torch.from_numpy(writable).view(dtype).view(shape)
