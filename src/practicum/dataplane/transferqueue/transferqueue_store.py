"""The `transferqueue` store: packed rows in the processes of TransferQueue, found through the index.

TransferQueue holds bytes and nothing else; keys and tags are in the index, as for the `ray` store. Its
sockets unpickle what any TCP peer sends them: for trusted networks only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.check_columns import check_columns
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column
from practicum.dataplane.ray_store.column_packing import pack_columns
from practicum.dataplane.ray_store.index_actor import start_index
from practicum.dataplane.ray_store.index_client import IndexClient, plain_put
from practicum.dataplane.ray_store.ray_store import RayStore
from practicum.dataplane.ray_store.row_locations import (
    ColumnLocations,
    Pack,
    Put,
    RowGroup,
    SavedField,
    Snapshot,
)
from practicum.dataplane.transferqueue.chunks import Chunk, ChunkedPut, cut_into_chunks, read_chunk
from practicum.dataplane.transferqueue.tq_client import (
    ChunkMissing,
    TransferQueueClient,
    client_of,
    close_client,
)
from practicum.dataplane.transferqueue.tq_servers import SIMPLE, Servers, start_servers
from practicum.errors import DeadlineError, StoreError

Result = TypeVar("Result")


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
    """The ray store with its bytes in TransferQueue. If one of its processes dies, every call fails."""

    def __init__(self, index: Any, client: TransferQueueClient, timeout_s: float) -> None:
        super().__init__(index, timeout_s)
        self._client, self._index = client, ChunkIndex(index, client, timeout_s)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, in the batch's order."""
        return self._repeat(super().get, batch, fields)

    def save(self, path: Path) -> None:
        """Write everything to a folder; this process reads it all."""
        self._repeat(super().save, path)

    def _repeat(self, read: Callable[..., Result], *args: Any) -> Result:
        """The result of `read`, which is repeated if rows are replaced while it runs."""
        deadline = time.monotonic() + self._timeout_s
        missing: list[str] = []
        while True:
            try:
                return read(*args)
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

    def _packed(self, batch: BatchRef, columns: Mapping[str, Column]) -> Put:
        """Check columns, and give their bytes to TransferQueue."""
        self._client.check()
        spans = check_columns(batch, columns)
        put = None
        if batch.keys and columns:
            put, chunks = cut_into_chunks(pack_columns(columns, spans), len(batch))
            self._client.put([chunk.name for chunk in put.chunks()], chunks, self._timeout_s)
        return plain_put(batch, spans, tuple(columns), put)

    def _fetch(self, locations: ColumnLocations | Snapshot, rows_of: Callable[[int], str]) -> list[Pack]:
        """The packs in these chunks."""
        chunks: list[Chunk] = locations.locators
        if not chunks:
            return []
        data = self._client.get([chunk.name for chunk in chunks], self._timeout_s)
        return [read_chunk(chunk, tensor) for chunk, tensor in zip(chunks, data, strict=True)]


class ChunkIndex(IndexClient):
    """Calls to an index that reports what it frees. The locators it returns are chunks, not puts."""

    def __init__(self, actor: Any, client: TransferQueueClient, timeout_s: float) -> None:
        super().__init__(actor, timeout_s)
        self._client = client

    def commit(self, put: Put) -> list[Any]:
        """Make a put visible, and free the chunks that it replaces; its own if it is refused."""
        return self._freeing([put], super().commit, put)

    def replace(self, puts: Sequence[Put]) -> list[Any]:
        """Forget everything, then take these puts."""
        return self._freeing(puts, super().replace, puts)

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> list[Any]:
        """Forget rows, and the chunks of puts of which nothing is left."""
        return self._freeing((), super().clear, partition, keys)

    def locate(self, batch: BatchRef, names: Sequence[str]) -> ColumnLocations:
        """In which chunks these fields of the batch's rows are; they may be freed at any time."""
        locations, numbers = super().locate(batch, names), _ChunkNumbers()
        groups = [
            RowGroup(fields, *numbers.of(locations.locators, puts, at))
            for fields, puts, at in locations.groups
        ]
        return ColumnLocations(numbers.chunks(), groups)

    def snapshot(self) -> Snapshot:
        """Everything, at this moment."""
        snapshot, numbers = super().snapshot(), _ChunkNumbers()
        partitions = [
            partition._replace(
                fields=[
                    SavedField(name, rows, *numbers.of(snapshot.locators, puts, at))
                    for name, rows, puts, at in partition.fields
                ]
            )
            for partition in snapshot.partitions
        ]
        return Snapshot(numbers.chunks(), partitions)

    def _freeing(self, puts: Iterable[Put], call: Any, *args: object) -> list[Any]:
        try:
            freed = call(*args)
        except StoreError:
            self._free(put.locator for put in puts)
            raise
        self._free(freed)
        return []

    def _free(self, locators: Iterable[Any]) -> None:
        # A put without columns has no locator.
        names = [chunk.name for put in locators if put is not None for chunk in put.chunks()]
        self._client.clear(names, self._timeout_s)

    def _call(self, method: str, *args: object, **options: Any) -> Any:
        self._client.check()
        return super()._call(method, *args, **options)


class _ChunkNumbers:
    """Numbers the chunks that rows lie in."""

    def __init__(self) -> None:
        self._number: dict[Chunk, int] = {}

    def of(
        self, locators: Sequence[ChunkedPut], puts: Sequence[int], at: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """For each row the number of its chunk, and its row there."""
        numbers: list[int] = []
        rows: list[int] = []
        for put, row in zip(puts, at, strict=True):
            chunk, chunk_row = locators[put].place(row)
            numbers.append(self._number.setdefault(chunk, len(self._number)))
            rows.append(chunk_row)
        return numbers, rows

    def chunks(self) -> list[Chunk]:
        """By number."""
        return list(self._number)
