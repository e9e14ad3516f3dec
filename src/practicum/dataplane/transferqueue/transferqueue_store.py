"""The `transferqueue` store: packed columns in the processes of TransferQueue, found through the index.

TransferQueue holds bytes and nothing else. Keys and tags are in the index, as for the `ray` store. A put is
one blob: its id and the pickled columns, because TransferQueue's cost grows with rows × fields, not with
bytes. Its sockets unpickle what any TCP peer sends them: for trusted networks only.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.packing import Packed
from practicum.dataplane.ragged import Column
from practicum.dataplane.ray_store.ray_store import RayStore
from practicum.dataplane.ray_store.store_index import ColumnLocations, Put, start_index
from practicum.dataplane.transferqueue.tq_client import (
    BlobMissing,
    Servers,
    TransferQueueClient,
    client_of,
    close_client,
    start_servers,
)
from practicum.errors import DeadlineError, StoreError

_ID_BYTES = 16


@dataclass(frozen=True)
class TransferQueueHandle:
    """The address of a transferqueue store. See `StoreHandle`. Every put outlives its writer."""

    index: Any
    servers: Servers

    def connect(self, timeout_s: float = 60.0, *, lasting: bool = True) -> TransferQueueStore:
        return TransferQueueStore(self.index, client_of(self.servers, timeout_s), timeout_s)

    def actors(self) -> dict[str, Any]:
        servers = {f"TransferQueue's {name}": actor for name, actor in self.servers.actors().items()}
        return {"the store's index": self.index, **servers}

    def close(self) -> None:
        close_client(self.servers)
        if ray.is_initialized():
            ray.kill(self.index)
            self.servers.close()


def start_transferqueue(
    units: int = 1, *, start_s: float = 180.0, where: Any = "DEFAULT"
) -> TransferQueueHandle:
    """Start an empty store, its index at `where`. Each storage unit and the controller take a CPU."""
    index = start_index(report_freed=True, where=where)  # starts while the servers do
    try:
        handle = TransferQueueHandle(index, start_servers(units, timeout_s=start_s))
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
        self._client = client

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        deadline = time.monotonic() + self._timeout_s
        missing: list[str] = []
        while True:
            try:
                return super().get(batch, fields)
            except BlobMissing as error:
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

    def _write(self, packed: Packed) -> bytes:
        uid, blob = uuid4().bytes, io.BytesIO()
        blob.write(uid)
        pickle.dump(packed, blob, protocol=5)
        self._client.put(uid.hex(), torch.frombuffer(blob.getbuffer(), dtype=torch.uint8), self._timeout_s)
        return uid

    def _read(self, batch: BatchRef, locations: ColumnLocations) -> list[Packed]:
        uids: list[bytes] = locations.locators
        blobs = self._client.get([uid.hex() for uid in uids], self._timeout_s)
        return [read_blob(uid, blob) for uid, blob in zip(uids, blobs, strict=True)]

    def _free(self, locators: Sequence[Any]) -> None:
        # A put without columns has no locator.
        self._client.clear([uid.hex() for uid in locators if uid is not None], self._timeout_s)

    def _commit(self, put: Put) -> None:
        try:
            super()._commit(put)
        except StoreError:
            self._free([put.locator])
            raise

    def _remote(self, method: str, *args: object, refs: Sequence[Any] = ()) -> Any:
        self._client.check()
        return super()._remote(method, *args, refs=refs)


def read_blob(uid: bytes, blob: torch.Tensor) -> Packed:
    """Return the put in a blob. Raise `BlobMissing` if the bytes are of another put: TransferQueue returns
    such if a slot was cleared and reused during a read."""
    view = blob.numpy().data
    if view[:_ID_BYTES] != uid:
        raise BlobMissing([uid.hex()])
    try:
        return pickle.loads(view[_ID_BYTES:])
    except Exception as error:
        raise StoreError(f"blob {uid.hex()} of TransferQueue is damaged: {error}") from error
