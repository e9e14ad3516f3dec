"""The store in this process: rows are handed out without copying."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import Cell, cell_value, check_columns, field_of, gather_cells
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.row_table import RowTable
from practicum.dataplane.store_files import read_rows, save_rows


class MemoryStore:
    """A Store in this process. Columns share memory with the tensors that were put, so modify neither."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: RowTable[Cell] = RowTable()

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        spans = check_columns(batch, columns)
        # One tuple of cells for each row, in the order of the columns.
        cells = list(zip(*map(_split, columns.values()), strict=True)) if columns else [()] * len(batch)
        tags = None if keep_tags else batch.tags
        with self._lock:
            self._rows.put(batch.partition, batch.keys, tags, spans, tuple(columns), cells)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        specs = [field_of(name) for name in fields]
        with self._lock:
            cells = {f.name: self._rows.cells(batch.partition, batch.keys, f.name) for f in specs}
        return {f.name: gather_cells(f, cells[f.name]) for f in specs}

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

    def save(self, path: Path, keys: Collection[Key] | None = None) -> None:
        with self._lock:
            groups = self._rows.alike(lambda cell: getattr(cell_value(cell), "shape", ())[1:])
            save_rows(path, self, groups, keys)

    def load(self, path: Path) -> None:
        loaded = MemoryStore()
        for batch, columns in read_rows(path):
            loaded.put(batch, columns)
        with self._lock:
            self._rows = loaded._rows


def _split(column: Column) -> list[Cell]:
    """Return a cell for each row. Rows that lie apart are kept one by one, so that each can be freed."""
    if isinstance(column, list):
        return [(value, None) for value in column]
    if isinstance(column, Ragged) and not column.is_packed:
        return [(row, None) for row in column.rows]
    return [(column, row) for row in range(len(column))]
