"""Rows as every store keeps them: keys in order of first put, tags, lengths, and a cell for each field.

Imports no torch, so that the index actor starts quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from practicum.dataplane.fields import FIELDS
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
        """Set these fields of these rows, `cells[i]` being those of row i; return the replaced cells. `spans`
        are the rows' tokens by extent. Without `tags` the rows must exist and keep theirs."""
        by_key = self.partitions.get(partition, {})
        if tags is None:
            self.rows(partition, keys)
        rows = [by_key.get(key) for key in keys]
        merged = _merged_spans(keys, rows, spans, names)
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
        """Return these rows. Raise StoreError if one is missing."""
        by_key = self.partitions.get(partition, {})
        try:
            return [by_key[key] for key in keys]
        except KeyError:
            missing = [Key._make(key) for key in keys if key not in by_key]
            raise StoreError(
                f"partition {partition!r} ({len(by_key)} rows) does not hold {name_keys(missing)}"
            ) from None

    def cells(self, partition: str, keys: Sequence[PlainKey], name: str) -> list[Cell]:
        """Return a field's cell of each row. Raise StoreError if a row or the field is missing."""
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
        keys = tuple(self.partitions.get(partition, ())) if keys is None else keys
        return keys, [row.tags for row in self.rows(partition, keys)]

    def tag(self, partition: str, keys: Sequence[PlainKey], tags: Sequence[Any]) -> None:
        for row, new in zip(self.rows(partition, keys), tags, strict=True):
            row.tags = new

    def clear(self, partition: str, keys: Sequence[PlainKey] | None) -> list[Any]:
        """Forget these rows, all of which must exist, or the whole partition. Return their cells."""
        by_key = self.partitions.get(partition, {})
        keys = list(by_key) if keys is None else list(dict.fromkeys(keys))
        rows = self.rows(partition, keys)
        for key in keys:
            del by_key[key]
        if not by_key:
            self.partitions.pop(partition, None)
        return [cell for row in rows for cell in row.cells.values()]

    def alike(self, kind: Callable[[Cell], Hashable]) -> list[tuple[str, list[PlainKey], list[str]]]:
        """Return partition, keys and fields of rows whose cells are of the same kind, field by field."""
        groups: dict[tuple[str, tuple[tuple[str, Hashable], ...]], list[PlainKey]] = {}
        for partition, by_key in self.partitions.items():
            for key, row in by_key.items():
                kinds = tuple((name, kind(cell)) for name, cell in row.cells.items())
                groups.setdefault((partition, kinds), []).append(key)
        return [(partition, keys, [name for name, _ in kinds]) for (partition, kinds), keys in groups.items()]

    def size(self, partition: str | None) -> int:
        if partition is not None:
            return len(self.partitions.get(partition, ()))
        return sum(map(len, self.partitions.values()))


def _merged_spans(
    keys: Sequence[PlainKey],
    rows: Sequence[Row[Any] | None],
    spans: Mapping[str, Sequence[int]],
    names: Sequence[str],
) -> list[dict[str, int]]:
    """Return the tokens of each row by extent once `names` are put; columns that disagree are a StoreError. A
    length may change only if every column of that extent changes with it."""
    merged = []
    for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
        before, cells = (row.spans, row.cells) if row is not None else ({}, {})
        new = {extent: tokens[i] for extent, tokens in spans.items()}
        for extent, tokens in new.items():
            held = [name for name in cells if name not in names and FIELDS[name].extent == extent]
            if held and before[extent] != tokens:
                wrong = next(name for name in names if FIELDS[name].extent == extent)
                raise StoreError(
                    f"{wrong} of {Key._make(key)} has {tokens} tokens, but its {held[0]}, which is held "
                    f"already, has {before[extent]}"
                )
        after = before | new
        if len(after) == 3 and after["prompt"] + after["response"] != after["sequence"]:
            sequence = next(name for name in (*names, *cells) if FIELDS[name].extent == "sequence")
            raise StoreError(
                f"{sequence} of {Key._make(key)} has {after['sequence']} tokens, but the row has "
                f"{after['prompt']} prompt + {after['response']} response tokens"
            )
        merged.append(after)
    return merged
