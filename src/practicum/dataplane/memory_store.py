"""The embedded store: rows in this process, handed out without copying."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from practicum.dataplane.batch import BatchRef, check_distinct
from practicum.dataplane.cells import Cell, cells_of, gather, value_of
from practicum.dataplane.check_columns import check_columns, field_of
from practicum.dataplane.fields import Field
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.rowspans import describe_lacking, merged_spans, name_keys
from practicum.dataplane.store_files import SavedRow, read_rows, write_rows
from practicum.errors import DeadlineError, StoreError


@dataclass(slots=True)
class _Row:
    tags: Tags
    cells: dict[str, Cell] = field(default_factory=dict)
    spans: dict[str, int] = field(default_factory=dict)


class MemoryStore:
    """A Store in this process. What is got shares memory with what was put: change neither."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._partitions: dict[str, dict[Key, _Row]] = {}

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        """Write columns by reference; nothing is written if anything is wrong."""
        spans = check_columns(batch, columns)
        # One tuple of cells for each row, in the order of the columns.
        cells = [cells_of(column) for column in columns.values()]
        cells = list(zip(*cells, strict=True)) if cells else [()] * len(batch)
        with self._changed:
            held = self._partitions.get(batch.partition, {})
            if keep_tags:
                self._rows(batch.partition, batch.keys)
            merged, new = [], set(columns)
            for i, key in enumerate(batch.keys):
                put = {extent: lengths[i] for extent, lengths in spans.items()}
                row = held.get(key)
                before, fields = (row.spans, row.cells) if row is not None else ({}, {})
                merged.append(merged_spans(key, before, fields, put, new))
            # Nothing raises from here on.
            if batch.keys:
                self._partitions[batch.partition] = held
            for (key, tags), values, tokens in zip(batch, cells, merged, strict=True):
                row = held.get(key)
                if row is None:
                    row = held[key] = _Row(tags)
                elif not keep_tags:
                    row.tags = tags
                row.spans = tokens
                row.cells.update(zip(columns, values, strict=True))
            self._changed.notify_all()

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, as views of what was put."""
        wanted = [field_of(name) for name in fields]
        with self._changed:
            rows = self._rows(batch.partition, batch.keys)
            cells = {f.name: _held(f, batch, rows) for f in wanted}
        return {f.name: gather(f, cells[f.name]) for f in wanted}

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags; a partition that holds nothing is an empty batch."""
        with self._changed:
            if keys is None:
                keys = tuple(self._partitions.get(partition, ()))
            rows = self._rows(partition, keys)
            return BatchRef(partition, tuple(keys), tuple(row.tags for row in rows))

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        with self._changed:
            for row, new in zip(self._rows(partition, tuple(tags)), tags.values(), strict=True):
                row.tags = new
            self._changed.notify_all()

    def wait(
        self,
        partition: str,
        keys: Sequence[Key],
        fields: Sequence[str],
        *,
        timeout: float,
        owner: str,
    ) -> BatchRef:
        """Until every row has every field or has failed; rows may come while waiting."""
        names = [field_of(name).name for name in fields]
        check_distinct(keys, f"what {owner} waits for")
        deadline = time.monotonic() + timeout
        with self._changed:
            lacking = self._lacking(partition, keys, names)
            while lacking:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(_overdue(owner, timeout, partition, len(keys), lacking))
                self._changed.wait(left)
                # Only what lacked is looked at again; all of it once more at the end, because a
                # row that had come may have been cleared meanwhile.
                lacking = self._lacking(partition, list(lacking), names) or self._lacking(
                    partition, keys, names
                )
            return self.batch(partition, keys)

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget these rows, all of which must exist, or the whole partition."""
        with self._changed:
            if keys is None:
                self._partitions.pop(partition, None)
                return
            self._rows(partition, keys)
            held = self._partitions.get(partition, {})
            for key in dict.fromkeys(keys):
                del held[key]
            if not held:
                self._partitions.pop(partition, None)

    def size(self, partition: str | None = None) -> int:
        """How many rows are held, in one partition or in all."""
        with self._changed:
            if partition is not None:
                return len(self._partitions.get(partition, ()))
            return sum(len(rows) for rows in self._partitions.values())

    def save(self, path: Path) -> None:
        """Write everything to a folder; a save that is cut short leaves the earlier one whole."""
        with self._changed:
            held = [
                (partition, key, row.tags, dict(row.cells))
                for partition, rows in self._partitions.items()
                for key, row in rows.items()
            ]
        write_rows(
            path,
            [
                SavedRow(partition, key, tags, {name: value_of(c) for name, c in cells.items()})
                for partition, key, tags, cells in held
            ],
        )

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote, on the CPU."""
        loaded = MemoryStore()
        for saved in read_rows(path):
            columns = {name: _column_of_one(name, value) for name, value in saved.values.items()}
            loaded.put(BatchRef(saved.partition, (saved.key,), (saved.tags,)), columns)
        with self._changed:
            self._partitions = loaded._partitions
            self._changed.notify_all()

    def _rows(self, partition: str, keys: Sequence[Key]) -> list[_Row]:
        held = self._partitions.get(partition, {})
        try:
            return [held[key] for key in keys]
        except KeyError:
            missing = [key for key in keys if key not in held]
            raise StoreError(
                f"partition {partition!r} ({len(held)} rows) does not hold {name_keys(missing)}"
            ) from None

    def _lacking(
        self, partition: str, keys: Sequence[Key], names: Sequence[str]
    ) -> dict[Key, list[str] | None]:
        """Rows that have not arrived, with the fields that each lacks; None if it was never put."""
        held = self._partitions.get(partition, {})
        lacking: dict[Key, list[str] | None] = {}
        for key in keys:
            row = held.get(key)
            if row is None:
                lacking[key] = None
            elif row.tags.status != "failed":
                absent = [name for name in names if name not in row.cells]
                if absent:
                    lacking[key] = absent
        return lacking


def _held(field: Field, batch: BatchRef, rows: list[_Row]) -> list[Cell]:
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


def _column_of_one(name: str, value: object) -> Column:
    extent = field_of(name).extent
    if extent == "object":
        return [value]
    assert isinstance(value, Tensor)
    return value[None] if extent == "scalar" else Ragged.from_rows([value])


def _overdue(
    owner: str, timeout: float, partition: str, wanted: int, lacking: Mapping[Key, list[str] | None]
) -> str:
    return (
        f"{owner} waited {timeout:g} s for {wanted} rows of partition {partition!r}, and "
        f"{len(lacking)} did not come: {describe_lacking(lacking)}"
    )
