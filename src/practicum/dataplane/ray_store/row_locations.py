"""What an index knows of the rows: keys in order of first put, tags, lengths, and where each field is.

Keys and tags are plain tuples here, because those travel between processes fastest. Imports no torch, so that
the index actor starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from practicum.dataplane.row_table import PlainKey, RowTable

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
    tags: list[tuple[Any, ...]] | None
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


@dataclass(slots=True, eq=False)
class _Source:
    """A put that is referred to by `cells` (row, field) pairs; it is freed with the last of them."""

    locator: Any
    cells: int


_Cell = tuple[_Source, int]


class RowLocations(RowTable[_Cell]):
    """Rows whose cells are in puts. Calls that drop the last cell of a put return its locator, so that the
    store may free it."""

    def commit(self, put: Put) -> list[Any]:
        """Take the rows of a put."""
        source = _Source(put.locator, len(put.keys) * len(put.fields))
        cells = [[(source, i)] * len(put.fields) for i in range(len(put.keys))]
        return _freed(self.put(put.partition, put.keys, put.tags, put.spans, put.fields, cells))

    def clear(self, partition: str, keys: Sequence[PlainKey] | None) -> list[Any]:
        """Forget these rows, all of which must exist, or the whole partition."""
        return _freed(super().clear(partition, keys))

    def locate(self, partition: str, keys: Sequence[PlainKey], names: Sequence[str]) -> ColumnLocations:
        """Where these fields of these rows are; a row or a field that is missing is an error."""
        groups: list[tuple[list[str], list[_Cell]]] = []
        for name in names:
            cells = self.cells(partition, keys, name)
            for fields, others in groups:
                if others == cells:
                    fields.append(name)
                    break
            else:
                groups.append(([name], cells))
        names_of_source: dict[_Source, set[str]] = {}
        for fields, cells in groups:
            for source in dict.fromkeys(source for source, _ in cells):
                names_of_source.setdefault(source, set()).update(fields)
        number = {source: i for i, source in enumerate(names_of_source)}
        # Of packs that the index holds itself, only the columns asked for.
        locators = [
            source.locator.only(fields) if isinstance(source.locator, Pack) else source.locator
            for source, fields in names_of_source.items()
        ]
        return ColumnLocations(
            locators,
            [
                RowGroup(fields, [number[source] for source, _ in cells], [at for _, at in cells])
                for fields, cells in groups
            ],
        )

    def alike(self) -> list[tuple[str, list[PlainKey], list[str]]]:
        """Partition, keys and fields of rows that can be got together: their fields are in the same puts."""
        groups: dict[tuple[Any, ...], list[PlainKey]] = {}
        for partition, by_key in self.partitions.items():
            for key, row in by_key.items():
                fields = tuple((name, source) for name, (source, _) in row.cells.items())
                groups.setdefault((partition, *fields), []).append(key)
        return [
            (partition, keys, [name for name, _ in fields]) for (partition, *fields), keys in groups.items()
        ]


def _freed(cells: Iterable[_Cell]) -> list[Any]:
    """Let go of cells; the locators of the puts of which none is left."""
    freed = []
    for source, _ in cells:
        source.cells -= 1
        if not source.cells:
            freed.append(source.locator)
    return freed
