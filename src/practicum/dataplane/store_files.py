"""How rows are written to a folder and read back: packed columns, and an index of keys and tags."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import StoreError

_FORMAT = 1
_INDEX = "index.json"
_COLUMNS = ("columns-0.pt", "columns-1.pt")


@dataclass(frozen=True, slots=True)
class SavedRow:
    """One row as it goes to disk: by field a tensor, or the object of an object field."""

    partition: str
    key: Key
    tags: Tags
    values: dict[str, Any]


def write_rows(path: Path, rows: Sequence[SavedRow]) -> None:
    """Write rows to a folder; a save that is cut short leaves the one before it whole."""
    path.mkdir(parents=True, exist_ok=True)
    # Columns go to the file that the current index does not name; the new index, renamed into
    # place, is the moment at which the save counts.
    current = _read_index(path)["columns"] if (path / _INDEX).exists() else None
    columns = next(name for name in _COLUMNS if name != current)
    with (path / columns).open("wb") as file:
        torch.save(_pack(rows), file)
        _flush(file)
    index = {
        "format": _FORMAT,
        "columns": columns,
        "rows": [[row.partition, list(row.key), asdict(row.tags)] for row in rows],
    }
    aside = path / f"{_INDEX}.part"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(index, file)
        _flush(file)
    os.replace(aside, path / _INDEX)
    if current is not None:
        (path / current).unlink(missing_ok=True)


def read_batches(path: Path) -> list[tuple[BatchRef, dict[str, Column]]]:
    """The rows that `write_rows` wrote, in their order; neighbours with like fields and widths together."""
    alike = groupby(_read_rows(path), key=lambda row: (row.partition, _shape(row)))
    return [_joined(list(rows)) for _, rows in alike]


def _read_rows(path: Path) -> list[SavedRow]:
    if not (path / _INDEX).exists():
        raise StoreError(f"{path} holds no saved store: {_INDEX} is not there")
    index = _read_index(path)
    try:
        rows = [SavedRow(p, Key(*key), Tags(**tags), {}) for p, key, tags in index["rows"]]
        # weights_only: a file of tensors and plain values runs no code when it is read.
        columns = torch.load(path / index["columns"], weights_only=True, map_location="cpu")
        _unpack(columns, rows)
    except (OSError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise StoreError(f"the store saved in {path} can't be read: {error}") from error
    return rows


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{path / _INDEX} is not the index of a saved store: {error}") from error
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise StoreError(f"{path / _INDEX} is not of format {_FORMAT}, the one that is read here")
    return index


def _pack(rows: Sequence[SavedRow]) -> list[dict[str, Any]]:
    """Columns of the values: one for each field and width, since top-k widths may differ by row."""
    packed: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for at, row in enumerate(rows):
        for name, value in row.values.items():
            width = tuple(value.shape[1:]) if isinstance(value, Tensor) else ()
            column = packed.setdefault((name, width), {"field": name, "rows": [], "values": []})
            column["rows"].append(at)
            column["values"].append(value)
    for column in packed.values():
        extent, values = FIELDS[column["field"]].extent, column["values"]
        if extent == "object":
            continue
        values = [value.detach().cpu() for value in values]
        if extent == "scalar":
            column["values"] = torch.stack(values)
        else:
            column["lengths"] = [value.shape[0] for value in values]
            column["values"] = torch.cat(values)
    return list(packed.values())


def _unpack(columns: Iterable[dict[str, Any]], rows: Sequence[SavedRow]) -> None:
    for column in columns:
        values = column["values"]
        if "lengths" in column:
            values = torch.split(values, column["lengths"])
        for at, value in zip(column["rows"], values, strict=True):
            rows[at].values[column["field"]] = value


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _shape(row: SavedRow) -> tuple[object, ...]:
    values = row.values.items()
    return tuple((name, value.shape[1:] if isinstance(value, Tensor) else ()) for name, value in values)


def _joined(rows: Sequence[SavedRow]) -> tuple[BatchRef, dict[str, Column]]:
    batch = BatchRef(rows[0].partition, tuple(row.key for row in rows), tuple(row.tags for row in rows))
    columns: dict[str, Column] = {}
    for name in rows[0].values:
        values = [row.values[name] for row in rows]
        extent = FIELDS[name].extent
        if extent == "object":
            columns[name] = values
        else:
            columns[name] = torch.stack(values) if extent == "scalar" else Ragged.from_rows(values)
    return batch, columns
