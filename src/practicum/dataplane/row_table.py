"""Rows as every store keeps them: keys in order of first put, tags, lengths, and a cell for each field.

Imports no torch, so that the index actor starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from practicum.dataplane.fields import FIELDS, merged_lengths
from practicum.dataplane.keys import Key, name_keys
from practicum.errors import StoreError

Cell = TypeVar("Cell")
PlainKey = tuple[int, ...]
"""A Key, or the same numbers as a plain tuple."""


@dataclass(slots=True, eq=False)
class Row(Generic[Cell]):
    """A row: its cells by field, and its tokens by extent."""

    tags: Any
    cells: dict[str, Cell] = field(default_factory=dict)
    spans: dict[str, int] = field(default_factory=dict)


class RowTable(Generic[Cell]):
    """Rows by partition and key. A call that raises changes nothing."""

    def __init__(self) -> None:
        self.partitions: dict[str, dict[PlainKey, Row[Cell]]] = {}

    def put(
        self,
        partition: str,
        keys: Sequence[PlainKey],
        tags: Sequence[Any] | None,
        spans: Mapping[str, Sequence[int]],
        names: Sequence[str],
        cells: Sequence[Sequence[Cell]],
    ) -> list[Cell]:
        """Set these fields of these rows, `cells[i]` being those of row i; gives the cells that they replace.

        `spans` are the rows' tokens by extent. Without `tags` the rows must exist and keep theirs.
        """
        by_key = self.partitions.get(partition, {})
        if tags is None:
            self.rows(partition, keys)
        rows = [by_key.get(key) for key in keys]
        merged = _merged(keys, rows, spans, set(names))
        # Nothing raises from here on.
        if keys:
            self.partitions[partition] = by_key
        replaced: list[Cell] = []
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if row is None:
                assert tags is not None
                row = by_key[key] = Row(tags[i])
            else:
                if tags is not None:
                    row.tags = tags[i]
                replaced += [row.cells[name] for name in names if name in row.cells]
            row.spans = merged[i]
            row.cells.update(zip(names, cells[i], strict=True))
        return replaced

    def rows(self, partition: str, keys: Sequence[PlainKey]) -> list[Row[Cell]]:
        """These rows; one that is missing is a StoreError."""
        by_key = self.partitions.get(partition, {})
        try:
            return [by_key[key] for key in keys]
        except KeyError:
            missing = [Key._make(key) for key in keys if key not in by_key]
            raise StoreError(
                f"partition {partition!r} ({len(by_key)} rows) does not hold {name_keys(missing)}"
            ) from None

    def cells(self, partition: str, keys: Sequence[PlainKey], name: str) -> list[Cell]:
        """A field's cell of each of these rows; a row or a field that is missing is a StoreError."""
        rows = self.rows(partition, keys)
        try:
            return [row.cells[name] for row in rows]
        except KeyError:
            pairs = zip(keys, rows, strict=True)
            missing = [Key._make(key) for key, row in pairs if name not in row.cells]
            raise StoreError(
                f"{name} (written by {FIELDS[name].writer}) is missing on {len(missing)} of {len(rows)} rows "
                f"of partition {partition!r}: {name_keys(missing)}"
            ) from None

    def batch(
        self, partition: str, keys: Sequence[PlainKey] | None = None
    ) -> tuple[Sequence[PlainKey], list[Any]]:
        """These keys, or all of the partition, and their tags."""
        keys = tuple(self.partitions.get(partition, ())) if keys is None else keys
        return keys, [row.tags for row in self.rows(partition, keys)]

    def tag(self, partition: str, keys: Sequence[PlainKey], tags: Sequence[Any]) -> None:
        """Replace the tags of these rows, all of which must exist."""
        for row, new in zip(self.rows(partition, keys), tags, strict=True):
            row.tags = new

    def clear(self, partition: str, keys: Sequence[PlainKey] | None) -> list[Any]:
        """Forget these rows, all of which must exist, or the whole partition; gives their cells."""
        by_key = self.partitions.get(partition, {})
        keys = list(by_key) if keys is None else list(dict.fromkeys(keys))
        rows = self.rows(partition, keys)
        for key in keys:
            del by_key[key]
        if not by_key:
            self.partitions.pop(partition, None)
        return [cell for row in rows for cell in row.cells.values()]

    def size(self, partition: str | None) -> int:
        """How many rows there are, in one partition or in all."""
        if partition is not None:
            return len(self.partitions.get(partition, ()))
        return sum(map(len, self.partitions.values()))


def _merged(
    keys: Sequence[PlainKey],
    rows: Sequence[Row[Any] | None],
    spans: Mapping[str, Sequence[int]],
    names: set[str],
) -> list[dict[str, int]]:
    """Tokens of each row once it is put; columns that disagree are a StoreError."""
    tokens = [dict(zip(spans, row, strict=True)) for row in zip(*spans.values(), strict=True)]
    merged = []
    for key, row, new in zip(keys, rows, tokens or [{}] * len(keys), strict=True):
        before, fields = (row.spans, row.cells) if row is not None else ({}, {})
        merged.append(merged_lengths(key, before, fields, new, names))
    return merged
