"""What an index knows of the rows: keys in order of first put, tags, lengths, and where each field is.

Keys and tags are plain tuples here, because those travel between processes fastest. Imports no torch, so that
the index actor starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from practicum.dataplane.fields import FIELDS, merged_lengths
from practicum.dataplane.keys import Key, name_keys
from practicum.errors import StoreError

PlainKey = tuple[int, int, int]
PlainTags = tuple[Any, ...]
"""The values of a Tags in the order of its fields."""
Bytes = np.ndarray | bytes
"""Raw bytes: an array [n] of uint8 in shared memory, or bytes that travel with a call."""


class PackedTensor(NamedTuple):
    """A tensor in a value of an object field."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class PackedColumn(NamedTuple):
    """A column of a tensor field: all rows, one after the other."""

    trailing: tuple[int, ...]
    data: Bytes


class Pack(NamedTuple):
    """The columns of one put, and the rows' lengths for each ragged extent among them.

    The column of an object field is a list of values in which PackedTensors stand for tensors.
    """

    lengths: dict[str, list[int]]
    columns: dict[str, PackedColumn | list[Any]]

    def only(self, names: set[str]) -> Pack:
        """The pack with these columns only."""
        if len(names) == len(self.columns):
            return self
        return Pack(self.lengths, {name: self.columns[name] for name in self.columns if name in names})


class Put(NamedTuple):
    """One put: its rows, the tokens of each by extent, and where its columns are.

    Without `tags` the rows must exist and keep theirs. `locator` is where the store finds the columns, opaque
    to the index; or the Pack itself, if it is small.
    """

    partition: str
    keys: list[PlainKey]
    tags: list[PlainTags] | None
    spans: dict[str, list[int]]
    fields: tuple[str, ...]
    locator: Any


class RowGroup(NamedTuple):
    """Fields that were put together: their row i is row `at[i]` of put number `puts[i]`."""

    fields: list[str]
    puts: list[int]
    at: list[int]


class ColumnLocations(NamedTuple):
    """Where columns are: the locators of the puts, and which rows of them."""

    locators: list[Any]
    groups: list[RowGroup]


class SavedField(NamedTuple):
    """A field of a partition: row `rows[i]` of the partition is row `at[i]` of put number `puts[i]`."""

    name: str
    rows: list[int]
    puts: list[int]
    at: list[int]


class SavedPartition(NamedTuple):
    """All rows of a partition in order of first put."""

    partition: str
    keys: list[PlainKey]
    tags: list[PlainTags]
    fields: list[SavedField]


class Snapshot(NamedTuple):
    """Everything, at one moment."""

    locators: list[Any]
    partitions: list[SavedPartition]


@dataclass(slots=True, eq=False)
class _Source:
    """A put that is referred to by `cells` (row, field) pairs; it is freed with the last of them."""

    locator: Any
    cells: int


_Cell = tuple[_Source, int]


@dataclass(slots=True, eq=False)
class _Row:
    tags: PlainTags
    cells: dict[str, _Cell] = field(default_factory=dict)
    spans: dict[str, int] = field(default_factory=dict)


class RowLocations:
    """Rows by partition and key. A call that raises changes nothing.

    Calls that drop the last cell of a put return its locator, so that the store may free it.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[PlainKey, _Row]] = {}

    def commit(self, put: Put) -> list[Any]:
        """Take the rows of a put."""
        by_key = self._partitions.get(put.partition, {})
        if put.tags is None:
            self._rows(put.partition, put.keys)
        rows = [by_key.get(key) for key in put.keys]
        merged = _merged(put, rows)
        # Nothing raises from here on.
        if put.keys:
            self._partitions[put.partition] = by_key
        source = _Source(put.locator, len(put.keys) * len(put.fields))
        freed: list[Any] = []
        for i, (key, row) in enumerate(zip(put.keys, rows, strict=True)):
            if row is None:
                assert put.tags is not None
                row = by_key[key] = _Row(put.tags[i])
            else:
                if put.tags is not None:
                    row.tags = put.tags[i]
                _drop([row.cells[name] for name in put.fields if name in row.cells], freed)
            row.spans = merged[i]
            row.cells.update(dict.fromkeys(put.fields, (source, i)))
        return freed

    def locate(self, partition: str, keys: Sequence[PlainKey], names: Sequence[str]) -> ColumnLocations:
        """Where these fields of these rows are; a row or a field that is missing is an error."""
        rows = self._rows(partition, keys)
        numbers = _Numbers()
        groups: list[tuple[list[str], list[_Cell]]] = []
        for name in names:
            cells = _cells(name, partition, keys, rows)
            for fields, others in groups:
                if others == cells:
                    fields.append(name)
                    break
            else:
                groups.append(([name], cells))
        row_groups = [RowGroup(fields, *numbers.of(fields, cells)) for fields, cells in groups]
        return ColumnLocations(numbers.locators(), row_groups)

    def keys(self, partition: str) -> list[PlainKey]:
        """All keys of a partition in order of first put."""
        return list(self._partitions.get(partition, ()))

    def tags(self, partition: str, keys: Sequence[PlainKey]) -> list[PlainTags]:
        """The tags of these rows, all of which must exist."""
        return [row.tags for row in self._rows(partition, keys)]

    def tag(self, partition: str, keys: Sequence[PlainKey], tags: Sequence[PlainTags]) -> None:
        """Replace the tags of these rows, all of which must exist."""
        for row, new in zip(self._rows(partition, keys), tags, strict=True):
            row.tags = new

    def clear(self, partition: str, keys: Sequence[PlainKey] | None) -> list[Any]:
        """Forget these rows, all of which must exist, or the whole partition."""
        freed: list[Any] = []
        by_key = self._partitions.get(partition, {})
        if keys is not None:
            self._rows(partition, keys)
        gone = list(by_key) if keys is None else list(dict.fromkeys(keys))
        for key in gone:
            _drop(by_key.pop(key).cells.values(), freed)
        if not by_key:
            self._partitions.pop(partition, None)
        return freed

    def size(self, partition: str | None) -> int:
        """How many rows there are, in one partition or in all."""
        if partition is not None:
            return len(self._partitions.get(partition, ()))
        return sum(len(rows) for rows in self._partitions.values())

    def partitions(self) -> list[str]:
        """Partitions that have rows."""
        return list(self._partitions)

    def snapshot(self) -> Snapshot:
        """Everything, for a save."""
        numbers, partitions = _Numbers(), []
        for partition, by_key in self._partitions.items():
            rows = list(by_key.values())
            fields = []
            for name in dict.fromkeys(name for row in rows for name in row.cells):
                which = [i for i, row in enumerate(rows) if name in row.cells]
                cells = [rows[i].cells[name] for i in which]
                fields.append(SavedField(name, which, *numbers.of([name], cells)))
            partitions.append(SavedPartition(partition, list(by_key), [row.tags for row in rows], fields))
        return Snapshot(numbers.locators(), partitions)

    def _rows(self, partition: str, keys: Sequence[PlainKey]) -> list[_Row]:
        by_key = self._partitions.get(partition, {})
        try:
            return [by_key[key] for key in keys]
        except KeyError:
            missing = [Key(*key) for key in keys if key not in by_key]
            raise StoreError(
                f"partition {partition!r} ({len(by_key)} rows) does not hold {name_keys(missing)}"
            ) from None


class _Numbers:
    """Numbers the puts that cells lie in, and remembers which of their fields are asked for."""

    def __init__(self) -> None:
        self._number: dict[_Source, int] = {}
        self._fields: list[set[str]] = []

    def of(self, names: Sequence[str], cells: Sequence[_Cell]) -> tuple[list[int], list[int]]:
        """For each cell the number of its put, and its row there."""
        number = self._number
        for source in dict.fromkeys(source for source, _ in cells):
            if source not in number:
                number[source] = len(number)
                self._fields.append(set())
            self._fields[number[source]].update(names)
        return [number[source] for source, _ in cells], [at for _, at in cells]

    def locators(self) -> list[Any]:
        """By number; of packs that the index holds itself, only the columns asked for."""
        return [
            source.locator.only(names) if isinstance(source.locator, Pack) else source.locator
            for source, names in zip(self._number, self._fields, strict=True)
        ]


def _merged(put: Put, rows: Sequence[_Row | None]) -> list[dict[str, int]]:
    """Tokens of each row once it is put; columns that disagree are a StoreError."""
    new, merged = set(put.fields), []
    # One dict of tokens for each row, by extent.
    extents = list(put.spans)
    spans = list(zip(*put.spans.values(), strict=True)) if extents else [()] * len(rows)
    for key, row, tokens in zip(put.keys, rows, spans, strict=True):
        before, fields = (row.spans, row.cells) if row is not None else ({}, {})
        merged.append(
            merged_lengths(Key._make(key), before, fields, dict(zip(extents, tokens, strict=True)), new)
        )
    return merged


def _cells(name: str, partition: str, keys: Sequence[PlainKey], rows: Sequence[_Row]) -> list[_Cell]:
    try:
        return [row.cells[name] for row in rows]
    except KeyError:
        missing = [Key(*key) for key, row in zip(keys, rows, strict=True) if name not in row.cells]
        raise StoreError(
            f"{name} (written by {FIELDS[name].writer}) is missing on {len(missing)} of {len(rows)} rows "
            f"of partition {partition!r}: {name_keys(missing)}"
        ) from None


def _drop(cells: Iterable[_Cell], freed: list[Any]) -> None:
    """Let go of cells; puts of which none is left are added to `freed`."""
    for source, _ in cells:
        source.cells -= 1
        if not source.cells:
            freed.append(source.locator)
