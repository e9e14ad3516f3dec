"""The store in this process: rows are handed out without copying."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.check_columns import check_columns, empty_column, field_of
from practicum.dataplane.fields import Field, merged_lengths
from practicum.dataplane.keys import Key, Tags, name_keys
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.store_files import SavedRow, read_rows, write_rows
from practicum.errors import StoreError

Cell = tuple[Any, int | None]
"""A packed column and the row in it, of which a view is made when it is read; or (value, None)."""


@dataclass(slots=True)
class _Row:
    tags: Tags
    cells: dict[str, Cell] = field(default_factory=dict)
    spans: dict[str, int] = field(default_factory=dict)


class MemoryStore:
    """A Store in this process. What is got shares memory with what was put: change neither."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._partitions: dict[str, dict[Key, _Row]] = {}

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        """Write columns by reference; nothing is written if anything is wrong."""
        spans = check_columns(batch, columns)
        # One tuple of cells for each row, in the order of the columns.
        cells = [_split(column) for column in columns.values()]
        cells = list(zip(*cells, strict=True)) if cells else [()] * len(batch)
        with self._lock:
            by_key = self._partitions.get(batch.partition, {})
            if keep_tags:
                self._rows(batch.partition, batch.keys)
            merged, new = [], set(columns)
            for i, key in enumerate(batch.keys):
                put = {extent: lengths[i] for extent, lengths in spans.items()}
                row = by_key.get(key)
                before, fields = (row.spans, row.cells) if row is not None else ({}, {})
                merged.append(merged_lengths(key, before, fields, put, new))
            # Nothing raises from here on.
            if batch.keys:
                self._partitions[batch.partition] = by_key
            for (key, tags), values, tokens in zip(batch, cells, merged, strict=True):
                row = by_key.get(key)
                if row is None:
                    row = by_key[key] = _Row(tags)
                elif not keep_tags:
                    row.tags = tags
                row.spans = tokens
                row.cells.update(zip(columns, values, strict=True))

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, as views of what was put."""
        specs = [field_of(name) for name in fields]
        with self._lock:
            rows = self._rows(batch.partition, batch.keys)
            cells = {f.name: _cells(f, batch, rows) for f in specs}
        return {f.name: _gather(f, cells[f.name]) for f in specs}

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags; a partition that holds nothing is an empty batch."""
        with self._lock:
            if keys is None:
                keys = tuple(self._partitions.get(partition, ()))
            rows = self._rows(partition, keys)
            return BatchRef(partition, tuple(keys), tuple(row.tags for row in rows))

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        with self._lock:
            for row, new in zip(self._rows(partition, tuple(tags)), tags.values(), strict=True):
                row.tags = new

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget these rows, all of which must exist, or the whole partition."""
        with self._lock:
            if keys is None:
                self._partitions.pop(partition, None)
                return
            self._rows(partition, keys)
            by_key = self._partitions.get(partition, {})
            for key in dict.fromkeys(keys):
                del by_key[key]
            if not by_key:
                self._partitions.pop(partition, None)

    def size(self, partition: str | None = None) -> int:
        """How many rows there are, in one partition or in all."""
        with self._lock:
            if partition is not None:
                return len(self._partitions.get(partition, ()))
            return sum(len(rows) for rows in self._partitions.values())

    def save(self, path: Path) -> None:
        """Write everything to a folder; a save that is cut short leaves the earlier one whole."""
        with self._lock:
            saved = [
                (partition, key, row.tags, dict(row.cells))
                for partition, rows in self._partitions.items()
                for key, row in rows.items()
            ]
        write_rows(
            path,
            [
                SavedRow(partition, key, tags, {name: _value(c) for name, c in cells.items()})
                for partition, key, tags, cells in saved
            ],
        )

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote, on the CPU."""
        loaded = MemoryStore()
        for saved in read_rows(path):
            columns = {name: _column_of_one(name, value) for name, value in saved.values.items()}
            loaded.put(BatchRef(saved.partition, (saved.key,), (saved.tags,)), columns)
        with self._lock:
            self._partitions = loaded._partitions

    def _rows(self, partition: str, keys: Sequence[Key]) -> list[_Row]:
        by_key = self._partitions.get(partition, {})
        try:
            return [by_key[key] for key in keys]
        except KeyError:
            missing = [key for key in keys if key not in by_key]
            raise StoreError(
                f"partition {partition!r} ({len(by_key)} rows) does not hold {name_keys(missing)}"
            ) from None


def _cells(field: Field, batch: BatchRef, rows: list[_Row]) -> list[Cell]:
    name = field.name
    try:
        return [row.cells[name] for row in rows]
    except KeyError:
        pairs = zip(batch.keys, rows, strict=True)
        missing = [key for key, row in pairs if name not in row.cells]
        raise StoreError(
            f"{name} (written by {field.writer}) is missing on {len(missing)} of {len(rows)} rows "
            f"of partition {batch.partition!r}: {name_keys(missing)}"
        ) from None


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


def _column_of_one(name: str, value: object) -> Column:
    extent = field_of(name).extent
    if extent == "object":
        return [value]
    assert isinstance(value, Tensor)
    return value[None] if extent == "scalar" else Ragged.from_rows([value])
