"""The `ray` store: packed columns in Ray's object store, found through the index.

A writer's bytes go to Ray's shared memory, where readers on the same node see them without a copy. Ray moves
them between nodes and spills them to disk when memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, ObjectStoreFullError
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.check_columns import check_columns, empty_column, field_of
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags, name_keys
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.ray_store.column_packing import (
    OpenPack,
    inline,
    pack_bytes,
    pack_columns,
    read_columns,
)
from practicum.dataplane.ray_store.index_actor import SharedPack, start_index
from practicum.dataplane.ray_store.index_client import IndexClient, plain_put
from practicum.dataplane.ray_store.row_locations import ColumnLocations, Pack, Put, RowGroup, Snapshot
from practicum.dataplane.store_files import SavedRow, read_rows, write_rows
from practicum.errors import DeadlineError, StoreError

INLINE_BYTES = 128 * 2**10
"""Puts of fewer bytes are held by the index itself, which is faster than an object for each."""


@dataclass(frozen=True)
class RayStoreHandle:
    """Where a ray store is; pickles, so that workers can be given it."""

    index: Any
    inline_bytes: int = INLINE_BYTES

    def connect(self, timeout_s: float = 60.0, *, lasting: bool = True) -> RayStore:
        """The store, for this process, with a deadline for each call.

        `lasting`: what this process puts outlives it. Without it a large put costs one copy less; that is for
        processes whose death ends the run.
        """
        if lasting:
            IndexClient(self.index, timeout_s).expect(ray.get_runtime_context().get_node_id())
        return RayStore(self.index, timeout_s, self.inline_bytes, lasting)

    def actors(self) -> dict[str, Any]:
        """The actors without which the store is lost, by the names that errors use."""
        return {"the store's index": self.index}

    def close(self) -> None:
        """End the store and free its memory. Closing it again does nothing."""
        if ray.is_initialized():
            ray.kill(self.index)


def start_ray_store(start_s: float = 60.0, inline_bytes: int = INLINE_BYTES) -> RayStoreHandle:
    """Start an empty store on the cluster that this process is connected to."""
    handle = RayStoreHandle(start_index(), inline_bytes)
    handle.connect(start_s, lasting=False).size()
    return handle


class RayStore:
    """A Store on Ray. What is got may share memory with what others get: change neither."""

    def __init__(
        self, index: Any, timeout_s: float, inline_bytes: int = INLINE_BYTES, lasting: bool = True
    ) -> None:
        self._index = IndexClient(index, timeout_s)
        self._timeout_s, self._inline_bytes, self._lasting = timeout_s, inline_bytes, lasting

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        """Write columns. A lasting put becomes visible once it no longer depends on this process."""
        put = self._packed(batch, columns)
        if put.keys:
            self._index.commit(put._replace(tags=None) if keep_tags else put)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, as views where they were put together in this order."""
        specs = [field_of(name) for name in fields]
        if not batch.keys:
            return {field.name: empty_column(field) for field in specs}
        locations = self._index.locate(batch, fields)
        packs = self._fetch(locations, lambda number: _rows_of_put(batch, locations.groups, number))
        columns = read_columns(locations, packs)
        return {field.name: columns[field.name] for field in specs}

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags; a partition that holds nothing is an empty batch."""
        return self._index.batch(partition, keys)

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        self._index.tag(partition, tags)

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget rows; the memory of a put is freed with the last of its values."""
        self._index.clear(partition, keys)

    def size(self, partition: str | None = None) -> int:
        """How many rows there are, in one partition or in all."""
        return self._index.size(partition)

    def save(self, path: Path) -> None:
        """Write everything to a folder; this process reads it all."""
        snapshot = self._index.snapshot()
        opened = [OpenPack(pack) for pack in self._fetch(snapshot, lambda _: "rows of the store")]
        saved: list[SavedRow] = []
        for partition, keys, tags, fields in snapshot.partitions:
            rows = [
                SavedRow(partition, Key._make(key), Tags(*values), {})
                for key, values in zip(keys, tags, strict=True)
            ]
            for name, which, puts, at in fields:
                for i, put, row in zip(which, puts, at, strict=True):
                    rows[i].values[name] = opened[put].value(FIELDS[name], row)
            saved += rows
        write_rows(path, saved)

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote."""
        alike = groupby(read_rows(path), key=lambda row: (row.partition, _shape(row)))
        self._index.replace([self._packed(*_joined(list(rows))) for _, rows in alike])

    def _packed(self, batch: BatchRef, columns: Mapping[str, Column]) -> Put:
        """Check columns, and put their bytes where others can read them."""
        spans = check_columns(batch, columns)
        if not (batch.keys and columns):
            return plain_put(batch, spans, tuple(columns), None)
        pack = pack_columns(columns, spans)
        size = pack_bytes(pack)
        locator: Any = inline(pack) if size < self._inline_bytes else self._share(pack, size)
        return plain_put(batch, spans, tuple(columns), locator)

    def _share(self, pack: Pack, size: int) -> SharedPack:
        try:
            ref = ray.put(pack)
        except ObjectStoreFullError as error:
            raise StoreError(
                f"Ray's object store on this node has no room for a put of {size / 2**20:.0f} MiB: give it "
                "more (runtime.object_store_gb, or --object-store-memory of ray start), or cut the batch"
            ) from error
        return SharedPack(ref, ray.get_runtime_context().get_node_id() if self._lasting else None)

    def _fetch(self, locations: ColumnLocations | Snapshot, rows_of: Callable[[int], str]) -> list[Pack]:
        """The packs at these locations; what is read stays in memory as long as it is used."""
        try:
            return self._read(locations.locators, rows_of)
        finally:
            self._index.release(locations)

    def _read(self, locators: Sequence[Any], rows_of: Callable[[int], str]) -> list[Pack]:
        """Packs that came with the locations as they are, the others from Ray's object store."""
        where = [i for i, locator in enumerate(locators) if isinstance(locator, ObjectRef)]
        packs = list(locators)
        try:
            read = ray.get([locators[i] for i in where], timeout=self._timeout_s) if where else []
        except ObjectLostError as error:
            number = next(i for i in where if locators[i].hex() == error.object_ref_hex)
            raise StoreError(
                f"{rows_of(number)} are lost: the process that held them in Ray's object store died "
                f"({type(error).__name__}); resume the run from its last checkpoint"
            ) from error
        except GetTimeoutError:
            raise DeadlineError(
                f"{rows_of(where[0])}, or others of the same get, took over {self._timeout_s:g} s: "
                "their node may be overloaded or cut off; runtime.store_s is the time that a call may take"
            ) from None
        for i, pack in zip(where, read, strict=True):
            packs[i] = pack
        return packs


def _rows_of_put(batch: BatchRef, groups: Sequence[RowGroup], number: int) -> str:
    """The fields and rows that lie in the put of that number."""
    names, rows = [], set[int]()
    for group in groups:
        in_put = [i for i, put in enumerate(group.puts) if put == number]
        names += group.fields if in_put else []
        rows.update(in_put)
    keys = [batch.keys[i] for i in sorted(rows)]
    return f"{', '.join(names)} of {name_keys(keys)} in partition {batch.partition!r}"


def _shape(row: SavedRow) -> tuple[object, ...]:
    """What rows must have in common to be put together: fields and widths."""
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
