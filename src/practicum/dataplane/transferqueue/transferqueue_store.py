"""The `transferqueue` store: rows in the processes of TransferQueue, found through the index.

TransferQueue holds bytes and nothing else; keys, tags and readiness are the index's, as for the
`ray` store. Its sockets unpickle what any TCP peer sends them: for trusted networks only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.check_columns import check_columns
from practicum.dataplane.ragged import Column
from practicum.dataplane.ray_store.column_packing import pack_columns
from practicum.dataplane.ray_store.index_actor import start_index
from practicum.dataplane.ray_store.index_client import plain_put
from practicum.dataplane.ray_store.packed_columns import Pack
from practicum.dataplane.ray_store.ray_store import RayStore
from practicum.dataplane.ray_store.row_locations import Located, Put, Snapshot
from practicum.dataplane.transferqueue.chunk_index import ChunkIndex
from practicum.dataplane.transferqueue.chunks import Chunk, ship, unpack
from practicum.dataplane.transferqueue.link import Gone, Link, close_link, link_to
from practicum.dataplane.transferqueue.servers import SIMPLE, Servers, start_servers
from practicum.errors import DeadlineError, StoreError

Result = TypeVar("Result")


@dataclass(frozen=True)
class TransferQueueHandle:
    """Where a transferqueue store is; pickles, so that workers can be given it."""

    index: Any
    servers: Servers

    def connect(self, timeout_s: float = 60.0, *, lasting: bool = True) -> TransferQueueStore:
        """The store, for this process; each call of it has so many seconds. What is put always lasts."""
        return TransferQueueStore(self.index, link_to(self.servers, timeout_s), timeout_s)

    def actors(self) -> dict[str, Any]:
        """The actors without which the store is lost, by their names for people."""
        servers = {f"TransferQueue's {name}": actor for name, actor in self.servers.actors().items()}
        return {"the store's index": self.index, **servers}

    def close(self) -> None:
        """End the store and free all that it holds. Closing it again does nothing."""
        close_link(self.servers)
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
    index = start_index(report_freed=True)  # comes up beside the servers
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
    """The ray store with its bytes in TransferQueue. After one of its processes died, each call fails."""

    def __init__(self, index: Any, link: Link, timeout_s: float) -> None:
        super().__init__(index, timeout_s)
        self._link, self._index = link, ChunkIndex(index, link, timeout_s)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, in the batch's order."""
        return self._again(super().get, batch, fields)

    def save(self, path: Path) -> None:
        """Write everything to a folder; this process reads it all."""
        self._again(super().save, path)

    def _again(self, read: Callable[..., Result], *args: Any) -> Result:
        """What `read` gives; it is tried again if what it looks for is replaced at that moment."""
        deadline = time.monotonic() + self._timeout_s
        missed: list[str] = []
        while True:
            try:
                return read(*args)
            except Gone as gone:
                # Names are never used twice: if the index knows the same ones still, they are lost.
                if gone.names == missed:
                    raise StoreError(
                        f"TransferQueue lost {gone}, though nobody cleared it: resume the run from its last "
                        "checkpoint"
                    ) from None
                missed = gone.names
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"rows were replaced again and again for {self._timeout_s:g} s while they were read"
                )

    def _packed(self, batch: BatchRef, columns: Mapping[str, Column]) -> Put:
        """Check columns, and give their bytes to TransferQueue."""
        self._link.check()
        spans = check_columns(batch, columns)
        shipment = None
        if batch.keys and columns:
            shipment, chunks = ship(pack_columns(columns, spans), len(batch))
            self._link.put([chunk.name for chunk in shipment.chunks()], chunks, self._timeout_s)
        return plain_put(batch, spans, tuple(columns), shipment)

    def _fetch(self, found: Located | Snapshot, rows_of: Callable[[int], str]) -> list[Pack]:
        """The packs in the chunks that were found."""
        chunks: list[Chunk] = found.locators
        if not chunks:
            return []
        held = self._link.get([chunk.name for chunk in chunks], self._timeout_s)
        return [unpack(chunk, data) for chunk, data in zip(chunks, held, strict=True)]
