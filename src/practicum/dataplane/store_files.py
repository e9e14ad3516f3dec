"""Write the rows of a store to a folder and read them back: one file of packed columns, keys and tags."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.store import Store
from practicum.errors import StoreError

_FORMAT = 2
_FILE = "rows.pt"


def save_rows(
    path: Path,
    store: Store,
    groups: Sequence[tuple[str, Sequence[Any], list[str]]],
    chosen: Collection[Key] | None = None,
) -> None:
    """Write the chosen rows of a store, or all. A save that is cut short leaves the one before it whole.
    `groups` are partition, keys and fields of rows that can be got together; all rows are in one of them."""
    rows, columns, wanted = [], [], None if chosen is None else set(chosen)
    for partition in dict.fromkeys(partition for partition, *_ in groups):
        batch = store.batch(partition).where(lambda key, _: wanted is None or key in wanted)
        rows.append((partition, [tuple(key) for key in batch.keys], [asdict(tags) for tags in batch.tags]))
    for partition, group, names in groups:
        keys = [key for key in map(Key._make, group) if wanted is None or key in wanted]
        if keys:
            got = store.get(store.batch(partition, keys), names)
            plain = {name: _plain(column) for name, column in got.items()}
            columns.append((partition, [tuple(key) for key in keys], plain))
    path.mkdir(parents=True, exist_ok=True)
    aside = path / f"{_FILE}.part"
    with aside.open("wb") as file:
        torch.save({"format": _FORMAT, "rows": rows, "columns": columns}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path / _FILE)


def read_rows(path: Path) -> list[tuple[BatchRef, dict[str, Column]]]:
    """Return the puts that make the saved rows: first all rows in their order, then the columns."""
    if not (path / _FILE).exists():
        raise StoreError(f"{path} holds no saved store: {_FILE} is missing")
    try:
        # weights_only: a file of tensors and plain values runs no code when it is read.
        saved = torch.load(path / _FILE, weights_only=True, map_location="cpu")
        if saved["format"] != _FORMAT:
            raise ValueError(f"its format is {saved['format']}, expected {_FORMAT}")
        tags_of: dict[tuple[str, Key], Tags] = {}
        for partition, keys, tags in saved["rows"]:
            tags_of |= {(partition, Key(*k)): Tags(**t) for k, t in zip(keys, tags, strict=True)}
        puts: list[tuple[BatchRef, dict[str, Column]]] = []
        for partition, keys, columns in [(p, keys, {}) for p, keys, _ in saved["rows"]] + saved["columns"]:
            named = tuple(Key(*key) for key in keys)
            batch = BatchRef(partition, named, tuple(tags_of[partition, key] for key in named))
            puts.append((batch, {name: _column(column) for name, column in columns.items()}))
        return puts
    except Exception as error:
        raise StoreError(f"the store saved in {path} can't be read: {error}") from error


def _plain(column: Column) -> Any:
    if isinstance(column, list):
        return column
    if isinstance(column, Ragged):  # a copy: of a view, torch would save all that it is a view of
        return column.values.detach().cpu().clone(), column.lengths
    return column.detach().cpu().clone()


def _column(plain: Any) -> Column:
    return Ragged.packed(*plain) if isinstance(plain, tuple) else plain
