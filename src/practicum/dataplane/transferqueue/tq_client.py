"""A process's client of TransferQueue: chunks of bytes in and out, with a deadline on every call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent import futures
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from practicum.dataplane.ragged import Ragged
from practicum.dataplane.transferqueue.tq_servers import Servers, prepare_import
from practicum.errors import DeadlineError, StoreError

_FIELD = "bytes"
_PARTITION = "practicum"
_CHECK_S = 2.0


class ChunkMissing(Exception):
    """One of these chunks, which were read together, is not in TransferQueue (any more)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        more = f" or one of {len(names) - 1} more" if len(names) > 1 else ""
        super().__init__(f"chunk {names[0]}{more}")


class TransferQueueClient:
    """Puts and gets chunks of bytes. A chunk's name is never used twice.

    All chunks are in one partition of TransferQueue: it never frees a partition that is cleared chunk by
    chunk, and clearing a whole partition would also drop puts that are under way.
    """

    def __init__(self, servers: Servers, timeout_s: float) -> None:
        self.servers = servers
        self._broken: str | None = None
        prepare_import(timeout_s)
        from transfer_queue.client import AsyncTransferQueueClient

        address, self._options = servers.opened()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transferqueue", daemon=True)
        self._thread.start()
        self._client = AsyncTransferQueueClient(f"practicum_{uuid4().hex[:12]}", address, zmq_io_threads=1)
        try:
            self.call(self._open(), "answer the first call", timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        """The result of `work`. If a process of TransferQueue died, this call and all later ones say so."""
        if self._broken:
            work.close()
            raise StoreError(self._broken)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            futures.wait([future], min(left, _CHECK_S))
            if future.done():
                break
            self._raise_if_dead(future)
        else:
            future.cancel()
            well = "its processes answer: the cluster is overloaded, or runtime.store_s is too short"
            why = self.servers.silence() or well
            raise DeadlineError(f"the store waited {timeout_s:g} s for TransferQueue to {what}; {why}")
        try:
            return future.result()
        except (ChunkMissing, StoreError):
            raise
        except Exception as error:
            self._raise_if_dead(future)
            why = self.servers.silence() or error
            raise StoreError(f"TransferQueue could not {what}: {why}") from error

    def put(self, names: Sequence[str], chunks: Ragged, timeout_s: float) -> None:
        """Store these chunks; all or none."""
        try:
            self.call(self._put(list(names), chunks), f"take {chunks.values.nbytes} bytes", timeout_s)
        except StoreError:
            # Not after a late put: it may still arrive, where another chunk is stored by then.
            if not self._broken:
                self.clear(names, timeout_s)
            raise

    def get(self, names: Sequence[str], timeout_s: float) -> list[Tensor]:
        """The chunks of these names; `ChunkMissing` if one is not there."""
        return self.call(self._get(list(names)), f"give {len(names)} chunks", timeout_s)

    def clear(self, names: Sequence[str], timeout_s: float) -> None:
        """Forget these chunks; those that are not there are skipped."""
        if names:
            self.call(self._clear(list(names)), f"forget {len(names)} chunks", timeout_s)

    def check(self) -> None:
        """A StoreError if an earlier call found that TransferQueue is broken."""
        if self._broken:
            raise StoreError(self._broken)

    def close(self) -> None:
        """Close sockets and threads; safe to call twice."""
        if self._thread.is_alive():
            self._broken = self._broken or "the store is closed"
            futures.wait([asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)], _CHECK_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CHECK_S)
            self._client.close()

    def _raise_if_dead(self, future: futures.Future[Any]) -> None:
        death = self.servers.death()
        if death is not None:
            self._broken = death
            future.cancel()
            raise StoreError(death)

    async def _open(self) -> None:
        # Blocks on a handshake, so it runs beside the loop.
        start = self._client.initialize_storage_manager
        await asyncio.to_thread(start, self.servers.backend, self._options)

    async def _put(self, names: list[str], chunks: Ragged) -> None:
        from tensordict import TensorDict

        meta = await self._client.async_kv_retrieve_meta(names, _PARTITION, create=True)
        if meta.size != len(names):
            raise StoreError(f"TransferQueue made room for {meta.size} of {len(names)} chunks")
        data = TensorDict({_FIELD: chunks.to_nested()}, batch_size=len(names))
        # Not the client's own put and get: they change torch's number of threads for the whole process,
        # and a put makes one more call to the controller that has no effect.
        await self._client.storage_manager.put_data(data, meta)

    async def _get(self, names: list[str]) -> list[Tensor]:
        from transfer_queue import StorageKeyNotFoundError

        meta = await self._client.async_kv_retrieve_meta(names, _PARTITION)
        if meta.size != len(names) or _FIELD not in meta.field_names or not meta.is_ready:
            raise ChunkMissing(names)
        try:
            data = await self._client.storage_manager.get_data(meta)
        except StorageKeyNotFoundError:
            raise ChunkMissing(names) from None
        chunks = Ragged.from_nested(data[_FIELD])
        if len(chunks) != len(names) or chunks.dtype is not torch.uint8:
            raise StoreError(f"TransferQueue gave {chunks} for {len(names)} chunks of bytes")
        return chunks.rows

    async def _clear(self, names: list[str]) -> None:
        meta = await self._client.async_kv_retrieve_meta(names, _PARTITION)
        if meta.size:
            await self._client.async_clear_samples(meta)


async def _cancel_all() -> None:
    """Cancel all other tasks of this loop; a task that is merely dropped leaves its socket open."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_CLIENTS: dict[str, TransferQueueClient] = {}
_LOCK = threading.Lock()


def client_of(servers: Servers, timeout_s: float) -> TransferQueueClient:
    """This process's client of these servers, made at the first call and shared by all its stores."""
    with _LOCK:
        client = _CLIENTS.get(servers.uid)
        if client is None:
            client = _CLIENTS[servers.uid] = TransferQueueClient(servers, timeout_s)
        return client


def close_client(servers: Servers) -> None:
    """Close this process's client of these servers, if there is one."""
    with _LOCK:
        client = _CLIENTS.pop(servers.uid, None)
    if client is not None:
        client.close()
