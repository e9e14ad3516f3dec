"""The store in this process: rows are handed out without copying."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.check_columns import check_columns, empty_column, field_of
from practicum.dataplane.fields import Field
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.row_table import RowTable
from practicum.dataplane.store_files import SavedRow, read_batches, write_rows
from practicum.errors import StoreError

Cell = tuple[Any, int | None]
"""A packed column and the row in it, of which a view is made when it is read; or (value, None)."""


class MemoryStore:
    """A Store in this process. What is got shares memory with what was put: change neither."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: RowTable[Cell] = RowTable()

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        """Write columns by reference; nothing is written if anything is wrong."""
        spans = check_columns(batch, columns)
        # One tuple of cells for each row, in the order of the columns.
        cells = list(zip(*map(_split, columns.values()), strict=True)) if columns else [()] * len(batch)
        tags = None if keep_tags else batch.tags
        with self._lock:
            self._rows.put(batch.partition, batch.keys, tags, spans, tuple(columns), cells)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, as views of what was put."""
        specs = [field_of(name) for name in fields]
        with self._lock:
            cells = {f.name: self._rows.cells(batch.partition, batch.keys, f.name) for f in specs}
        return {f.name: _gather(f, cells[f.name]) for f in specs}

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        with self._lock:
            held_keys, tags = self._rows.batch(partition, keys)
        return BatchRef(partition, tuple(map(Key._make, held_keys)), tuple(tags))

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        with self._lock:
            self._rows.tag(partition, tuple(tags), tuple(tags.values()))

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        with self._lock:
            self._rows.clear(partition, keys)

    def size(self, partition: str | None = None) -> int:
        with self._lock:
            return self._rows.size(partition)

    def save(self, path: Path) -> None:
        """Write everything to a folder; a save that is cut short leaves the earlier one whole."""
        with self._lock:
            saved = [
                SavedRow(partition, Key._make(key), row.tags, dict(row.cells))
                for partition, rows in self._rows.partitions.items()
                for key, row in rows.items()
            ]
        for row in saved:
            row.values.update({name: _value(cell) for name, cell in row.values.items()})
        write_rows(path, saved)

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote, on the CPU."""
        loaded = MemoryStore()
        for batch, columns in read_batches(path):
            loaded.put(batch, columns)
        with self._lock:
            self._rows = loaded._rows


def _split(column: Column) -> list[Cell]:
    """A cell for each row. Rows that lie apart are kept one by one, so that each can be freed."""
    if isinstance(column, list):
        return [(value, None) for value in column]
    if isinstance(column, Ragged) and not column.is_packed:
        return [(row, None) for row in column.rows]
    return [(column, i) for i in range(len(column))]


def _value(cell: Cell) -> Any:
    """The row's own value: a tensor, or the object of an object field."""
    source, i = cell
    return source if i is None else source[i]


def _gather(field: Field, cells: list[Cell]) -> Column:
    """The column of these cells: a view if they lie in one packed column."""
    if field.extent == "object":
        return [value for value, _ in cells]
    if not cells:
        return empty_column(field)
    source, first = cells[0]
    if first is not None and len({id(source) for source, _ in cells}) == 1:
        indices = [i for _, i in cells if i is not None]
        return source.select(indices) if isinstance(source, Ragged) else _scalars(source, indices)
    values = [_value(cell) for cell in cells]
    if field.extent == "scalar":
        return torch.stack(values)
    try:
        return Ragged.from_rows(values)
    except ValueError as error:
        raise StoreError(f"{field.name} was put in several widths: {error}") from None


def _scalars(column_B: Tensor, indices: list[int]) -> Tensor:
    first = indices[0]
    if indices == list(range(first, first + len(indices))):
        return column_B[first : first + len(indices)]
    return column_B[torch.tensor(indices)]
