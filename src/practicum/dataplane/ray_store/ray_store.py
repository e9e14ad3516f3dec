"""The `ray` store: packed columns in Ray's object store, found through the index.

A writer's bytes go to Ray's shared memory, where readers on the same node see them without a copy. Ray moves
them between nodes and spills them to disk when memory is short.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    RayActorError,
    RayTaskError,
)

from practicum.dataplane.batch import BatchRef, plain_keys, plain_tags
from practicum.dataplane.check_columns import check_columns, empty_column, field_of
from practicum.dataplane.keys import Key, Tags, name_keys
from practicum.dataplane.ragged import Column
from practicum.dataplane.ray_store.column_packing import inline, pack_bytes, pack_columns, read_columns
from practicum.dataplane.ray_store.index_actor import SharedPack, decode_answer, start_index
from practicum.dataplane.ray_store.row_locations import ColumnLocations, Pack, Put, RowGroup
from practicum.dataplane.store_files import SavedRow, read_batches, write_rows
from practicum.errors import DeadlineError, PracticumError, StoreError

_REFS = threading.Lock()
"""Held while object references come into this process or leave it.

Ray loses an object if one thread drops its last reference while another receives one; reading it then hangs.
"""

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
            self.index.expect.remote(ray.get_runtime_context().get_node_id())
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
    """A Store on Ray. What is got may share memory with what others get: change neither.

    Each call of the index has `timeout_s` seconds.
    """

    def __init__(
        self, index: Any, timeout_s: float, inline_bytes: int = INLINE_BYTES, lasting: bool = True
    ) -> None:
        self._index, self._timeout_s = index, timeout_s
        self._inline_bytes, self._lasting = inline_bytes, lasting

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        """Write columns. A lasting put becomes visible once it no longer depends on this process."""
        put = self._packed(batch, columns)
        if put.keys:
            self._commit(put._replace(tags=None) if keep_tags else put)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, as views where they were put together in this order."""
        specs = [field_of(name) for name in fields]
        if not batch.keys:
            return {field.name: empty_column(field) for field in specs}
        locations = self._locate(batch, fields)
        packs = self._fetch(batch, locations)
        columns = read_columns(locations, packs)
        return {field.name: columns[field.name] for field in specs}

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        held_keys, tags = self._call("batch", partition, None if keys is None else plain_keys(keys))
        return BatchRef(partition, tuple(map(Key._make, held_keys)), tuple(Tags(*values) for values in tags))

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        self._call("tag", partition, plain_keys(tuple(tags)), [plain_tags(new) for new in tags.values()])

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget rows; the memory of a put is freed with the last of its values."""
        self._call("clear", partition, None if keys is None else plain_keys(keys))

    def size(self, partition: str | None = None) -> int:
        return self._call("size", partition)

    def save(self, path: Path) -> None:
        """Write everything to a folder; this process reads it all. Nobody may write meanwhile."""
        groups = self._call("alike")
        saved = {
            (partition, key): SavedRow(partition, key, tags, {})
            for partition in dict.fromkeys(partition for partition, *_ in groups)
            for key, tags in self.batch(partition)
        }
        for partition, keys, names in groups:
            batch = self.batch(partition, keys)
            for name, column in self.get(batch, names).items():
                for i, key in enumerate(batch.keys):
                    saved[partition, key].values[name] = column[i]
        write_rows(path, list(saved.values()))

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote. Nobody may read or write meanwhile."""
        batches = read_batches(path)
        for partition in dict.fromkeys(partition for partition, *_ in self._call("alike")):
            self.clear(partition)
        for batch, columns in batches:
            self.put(batch, columns)

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

    def _commit(self, put: Put) -> list[Any]:
        """Make a put visible, all of it or nothing; gives what it frees, if the index reports that."""
        if isinstance(put.locator, SharedPack):
            ref, node = put.locator
            return self._call("commit", put._replace(locator=None), node, refs=[ref])
        return self._call("commit", put)

    def _locate(self, batch: BatchRef, names: Sequence[str]) -> ColumnLocations:
        """Where these fields of the batch's rows are."""
        call = self._remote("locate", batch.partition, plain_keys(batch.keys), tuple(names))
        ray.wait([call], timeout=self._timeout_s)
        with _REFS:
            return self._answer("locate", call, 0)

    def _call(self, method: str, *args: object, refs: Sequence[Any] = ()) -> Any:
        """What the index answers."""
        return self._answer(method, self._remote(method, *args, refs=refs), self._timeout_s)

    def _remote(self, method: str, *args: object, refs: Sequence[Any] = ()) -> Any:
        return self._index.call.remote(method, pickle.dumps(args, protocol=5), list(refs))

    def _answer(self, method: str, call: Any, timeout_s: float) -> Any:
        """The result of a call; the index's own errors as they were raised there."""
        try:
            return decode_answer(ray.get(call, timeout=timeout_s))
        except RayTaskError as error:
            if isinstance(error.cause, PracticumError):
                raise error.cause from None
            raise
        except RayActorError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise StoreError(
                f"the store's index died, and all rows of the store with it (during {method}): "
                f"resume the run from its last checkpoint. Ray says: {reason}"
            ) from error
        except GetTimeoutError:
            raise DeadlineError(
                f"the store's index did not answer {method} within {self._timeout_s:g} s: its node may be "
                "overloaded or cut off; runtime.store_s is the time that a call may take"
            ) from None

    def _fetch(self, batch: BatchRef, locations: ColumnLocations) -> list[Pack]:
        """The packs at these locations; what is read stays in memory as long as it is used."""
        try:
            return self._read(
                locations.locators, lambda number: _rows_of_put(batch, locations.groups, number)
            )
        finally:
            with _REFS:
                locations.locators.clear()

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


def plain_put(batch: BatchRef, spans: dict[str, list[int]], names: Sequence[str], locator: Any) -> Put:
    """A put of checked columns, whose bytes are at `locator`."""
    tags = [plain_tags(tags) for tags in batch.tags]
    return Put(batch.partition, plain_keys(batch.keys), tags, spans, tuple(names), locator)
