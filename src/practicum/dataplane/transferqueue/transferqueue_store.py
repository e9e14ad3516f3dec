"""The `transferqueue` store: packed rows in the processes of TransferQueue, found through the index.

TransferQueue holds bytes and nothing else; keys and tags are in the index, as for the `ray` store. Its
sockets unpickle what any TCP peer sends them: for trusted networks only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from practicum.dataplane.batch import BatchRef, plain_keys
from practicum.dataplane.check_columns import check_columns
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column
from practicum.dataplane.ray_store.column_packing import pack_columns
from practicum.dataplane.ray_store.index_actor import start_index
from practicum.dataplane.ray_store.ray_store import RayStore, plain_put
from practicum.dataplane.ray_store.row_locations import ColumnLocations, Pack, Put, RowGroup
from practicum.dataplane.transferqueue.chunks import Chunk, cut_into_chunks, read_chunk
from practicum.dataplane.transferqueue.tq_client import (
    ChunkMissing,
    TransferQueueClient,
    client_of,
    close_client,
)
from practicum.dataplane.transferqueue.tq_servers import SIMPLE, Servers, start_servers
from practicum.errors import DeadlineError, StoreError


@dataclass(frozen=True)
class TransferQueueHandle:
    """Where a transferqueue store is; can be pickled to workers."""

    index: Any
    servers: Servers

    def connect(self, timeout_s: float = 60.0, *, lasting: bool = True) -> TransferQueueStore:
        """The store, for this process, with a deadline for each call. Every put outlives its writer."""
        return TransferQueueStore(self.index, client_of(self.servers, timeout_s), timeout_s)

    def actors(self) -> dict[str, Any]:
        """The actors without which the store is lost, by the names that errors use."""
        servers = {f"TransferQueue's {name}": actor for name, actor in self.servers.actors().items()}
        return {"the store's index": self.index, **servers}

    def close(self) -> None:
        """End the store and free its memory. Closing it again does nothing."""
        close_client(self.servers)
        if ray.is_initialized():
            ray.kill(self.index)
            self.servers.close()


def start_transferqueue(
    units: int = 1,
    backend: str = SIMPLE,
    options: Mapping[str, Any] | None = None,
    *,
    unit_gb: float = 0.0,
    start_s: float = 180.0,
) -> TransferQueueHandle:
    """Start an empty store on the cluster that this process is connected to.

    `units` storage units and a controller take a CPU each, a unit also `unit_gb` GiB of memory; `options` are
    the backend's own, as in TransferQueue's config.yaml.
    """
    index = start_index(report_freed=True)  # starts while the servers do
    try:
        servers = start_servers(units, backend, options, unit_gb=unit_gb, timeout_s=start_s)
        handle = TransferQueueHandle(index, servers)
    except BaseException:
        ray.kill(index)
        raise
    try:
        handle.connect(start_s).size()
    except BaseException:
        handle.close()
        raise
    return handle


class TransferQueueStore(RayStore):
    """The ray store with its bytes in TransferQueue. If one of its processes dies, every call fails.

    Its index reports what it frees. Locations are in chunks, not in puts.
    """

    def __init__(self, index: Any, client: TransferQueueClient, timeout_s: float) -> None:
        super().__init__(index, timeout_s)
        self._client = client

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, read again if they were replaced meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        missing: list[str] = []
        while True:
            try:
                return super().get(batch, fields)
            except ChunkMissing as error:
                # Names are never used twice: if the index still knows the same ones, they are lost.
                if error.names == missing:
                    raise StoreError(
                        f"TransferQueue lost {error}, though nobody cleared it: resume the run from its last "
                        "checkpoint"
                    ) from None
                missing = error.names
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"rows were replaced again and again for {self._timeout_s:g} s while they were read"
                )

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget rows, and the chunks of puts of which nothing is left."""
        self._free(self._call("clear", partition, None if keys is None else plain_keys(keys)))

    def _packed(self, batch: BatchRef, columns: Mapping[str, Column]) -> Put:
        """Check columns, and give their bytes to TransferQueue."""
        self._client.check()
        spans = check_columns(batch, columns)
        put = None
        if batch.keys and columns:
            put, chunks = cut_into_chunks(pack_columns(columns, spans), len(batch))
            self._client.put([chunk.name for chunk in put.chunks()], chunks, self._timeout_s)
        return plain_put(batch, spans, tuple(columns), put)

    def _fetch(self, batch: BatchRef, locations: ColumnLocations) -> list[Pack]:
        """The packs in these chunks."""
        chunks: list[Chunk] = locations.locators
        if not chunks:
            return []
        data = self._client.get([chunk.name for chunk in chunks], self._timeout_s)
        return [read_chunk(chunk, tensor) for chunk, tensor in zip(chunks, data, strict=True)]

    def _commit(self, put: Put) -> list[Any]:
        """Make a put visible, and free the chunks that it replaces; its own if it is refused."""
        try:
            freed = super()._commit(put)
        except StoreError:
            self._free([put.locator])
            raise
        self._free(freed)
        return []

    def _locate(self, batch: BatchRef, names: Sequence[str]) -> ColumnLocations:
        """In which chunks these fields of the batch's rows are; they may be freed at any time."""
        locations, number = super()._locate(batch, names), dict[Chunk, int]()
        groups = []
        for fields, puts, at in locations.groups:
            places = [locations.locators[put].place(row) for put, row in zip(puts, at, strict=True)]
            numbers = [number.setdefault(chunk, len(number)) for chunk, _ in places]
            groups.append(RowGroup(fields, numbers, [row for _, row in places]))
        return ColumnLocations(list(number), groups)

    def _free(self, locators: Sequence[Any]) -> None:
        # A put without columns has no locator.
        names = [chunk.name for put in locators if put is not None for chunk in put.chunks()]
        self._client.clear(names, self._timeout_s)

    def _remote(self, method: str, *args: object, refs: Sequence[Any] = ()) -> Any:
        self._client.check()
        return super()._remote(method, *args, refs=refs)
