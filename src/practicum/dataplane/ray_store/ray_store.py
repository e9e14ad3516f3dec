"""The `ray` store: packed columns in Ray's object store, found through the index.

A writer's bytes go to Ray's shared memory, where readers on the same node see them without a copy. Ray moves
them between nodes and spills them to disk when memory is short.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, ObjectStoreFullError, RayActorError, RayTaskError

from practicum.compat.ray import on_host
from practicum.dataplane.batch import BatchRef, plain_keys, plain_tags
from practicum.dataplane.columns import check_columns, field_of, gather_cells
from practicum.dataplane.keys import Key, Tags, name_keys
from practicum.dataplane.packing import Packed, pack
from practicum.dataplane.ragged import Column
from practicum.dataplane.ray_store.store_index import ColumnLocations, Put, decode_answer, start_index
from practicum.dataplane.store_files import read_rows, save_rows
from practicum.errors import DeadlineError, PracticumError, StoreError

_REFS = threading.Lock()
"""Held while object references come into this process or leave it.

Ray loses an object if one thread drops its last reference while another receives one; reading it then hangs.
"""

INLINE_BYTES = 128 * 2**10
"""Puts of fewer bytes are held by the index itself, which is faster than an object for each."""


@dataclass(frozen=True)
class RayStoreHandle:
    """The address of a ray store. See `StoreHandle`."""

    index: Any
    inline_bytes: int = INLINE_BYTES

    def connect(self, timeout_s: float = 60.0, *, lasting: bool = True) -> RayStore:
        if lasting:
            self.index.expect.remote(ray.get_runtime_context().get_node_id())
        return RayStore(self.index, timeout_s, self.inline_bytes, lasting)

    def actors(self) -> dict[str, Any]:
        return {"the store's index": self.index}

    def close(self) -> None:
        if ray.is_initialized():
            ray.kill(self.index)


def start_ray_store(
    start_s: float = 60.0, inline_bytes: int = INLINE_BYTES, where: Any = "DEFAULT"
) -> RayStoreHandle:
    """Start an empty store on the cluster that this process is connected to, with its index at `where`."""
    handle = RayStoreHandle(start_index(where=where), inline_bytes)
    handle.connect(start_s, lasting=False).size()
    return handle


class RayStore:
    """A Store on Ray, with `timeout_s` for each call. What is got may be shared: do not change it."""

    def __init__(
        self, index: Any, timeout_s: float, inline_bytes: int = INLINE_BYTES, lasting: bool = True
    ) -> None:
        self._index, self._timeout_s = index, timeout_s
        self._inline_bytes, self._lasting = inline_bytes, lasting

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        spans = check_columns(batch, columns)
        if batch.keys:
            locator = self._write(pack(dict(columns))) if columns else None
            tags = None if keep_tags else plain_tags(batch.tags)
            self._commit(Put(batch.partition, plain_keys(batch.keys), tags, spans, tuple(columns), locator))

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        specs = [field_of(name) for name in fields]
        locations = self._locate(batch, fields)
        puts = [packed.unpack() for packed in self._read(batch, locations)]
        cells = {
            name: [(puts[number][name], row) for number, row in places]
            for name, places in locations.columns.items()
        }
        return {field.name: gather_cells(field, cells[field.name]) for field in specs}

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        tags, held = self._call("batch", partition, None if keys is None else plain_keys(keys))
        held_keys = keys if keys is not None else map(Key._make, held)
        return BatchRef(partition, tuple(held_keys), tuple(starmap(Tags, tags)))

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        self._call("tag", partition, plain_keys(tuple(tags)), plain_tags(tags.values()))

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        self._free(self._call("clear", partition, None if keys is None else plain_keys(keys)))

    def size(self, partition: str | None = None) -> int:
        return self._call("size", partition)

    def save(self, path: Path, keys: Collection[Key] | None = None) -> None:
        save_rows(path, self, self._call("groups"), keys)

    def load(self, path: Path) -> None:
        puts = read_rows(path)
        for partition in dict.fromkeys(partition for partition, *_ in self._call("groups")):
            self.clear(partition)
        for batch, columns in puts:
            self.put(batch, columns)

    def _write(self, packed: Packed) -> Any:
        """Put bytes where other processes can read them, and return their locator."""
        if packed.nbytes < self._inline_bytes:
            return pickle.dumps(packed, protocol=5)
        try:
            return ray.put(packed)
        except ObjectStoreFullError as error:
            raise StoreError(
                f"Ray's object store on this node has no room for a put of {packed.nbytes / 2**20:.0f} MiB: "
                "raise it (--object-store-memory of ray start, and runtime.address), or reduce the "
                "batch"
            ) from error

    def _free(self, locators: Sequence[Any]) -> None:
        """Free the bytes of puts that the index reports as freed. Ray counts references itself."""

    def _commit(self, put: Put) -> None:
        if isinstance(put.locator, ObjectRef):
            node = ray.get_runtime_context().get_node_id() if self._lasting else None
            self._call("commit", put._replace(locator=None), node, refs=[put.locator])
        else:
            self._free(self._call("commit", put))

    def _locate(self, batch: BatchRef, names: Sequence[str]) -> ColumnLocations:
        call = self._remote("locate", batch.partition, plain_keys(batch.keys), tuple(names))
        ray.wait([call], timeout=self._timeout_s)
        with _REFS:
            return self._answer("locate", call, 0)

    def _call(self, method: str, *args: object, refs: Sequence[Any] = ()) -> Any:
        return self._answer(method, self._remote(method, *args, refs=refs), self._timeout_s)

    def _remote(self, method: str, *args: object, refs: Sequence[Any] = ()) -> Any:
        return self._index.call.remote(method, pickle.dumps(args, protocol=5), list(refs))

    def _answer(self, method: str, call: Any, timeout_s: float) -> Any:
        """Return the result of a call, or raise the index's error."""
        try:
            return decode_answer(ray.get(call, timeout=timeout_s))
        except RayTaskError as error:
            if isinstance(error.cause, PracticumError):
                raise error.cause from None
            raise
        except RayActorError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            host = on_host(call, error)
            raise StoreError(
                f"the store's index{host} died, and all rows of the store with it (during {method}): "
                f"resume the run from its last checkpoint. Ray says: {reason}"
            ) from error
        except GetTimeoutError:
            raise DeadlineError(
                f"the store's index{on_host(call)} did not answer {method} within "
                f"{self._timeout_s:g} s: its node may be "
                "overloaded or cut off; runtime.stage_s is the time that a call may take"
            ) from None

    def _read(self, batch: BatchRef, locations: ColumnLocations) -> list[Packed]:
        """Return the puts: those that came with the locations, the others from Ray's object store."""
        puts = locations.locators
        where = [i for i, locator in enumerate(puts) if isinstance(locator, ObjectRef)]
        try:
            read = ray.get([puts[i] for i in where], timeout=self._timeout_s) if where else []
        except ObjectLostError as error:
            number = next(i for i in where if puts[i].hex() == error.object_ref_hex)
            raise StoreError(
                f"{_rows_of_put(batch, locations, number)} are lost: the process that held them in "
                f"Ray's object store died ({type(error).__name__}); resume the run from its last checkpoint"
            ) from error
        except GetTimeoutError:
            raise DeadlineError(
                f"{_rows_of_put(batch, locations, where[0])}, or others of the same get, took over "
                f"{self._timeout_s:g} s: their node may be overloaded or cut off; runtime.stage_s is the "
                "time that a call may take"
            ) from None
        with _REFS:
            for i, packed in zip(where, read, strict=True):
                puts[i] = packed
        return [pickle.loads(put) if isinstance(put, bytes) else put for put in puts]


def _rows_of_put(batch: BatchRef, locations: ColumnLocations, number: int) -> str:
    """Name the fields and rows that lie in the put of that number."""
    rows_of = {
        name: [i for i, (put, _) in enumerate(places) if put == number]
        for name, places in locations.columns.items()
    }
    names = [name for name, rows in rows_of.items() if rows]
    keys = [batch.keys[i] for i in sorted({i for rows in rows_of.values() for i in rows})]
    return f"{', '.join(names)} of {name_keys(keys)} in partition {batch.partition!r}"
