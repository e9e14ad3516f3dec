"""A process's client of TransferQueue: blobs of bytes in and out, with a deadline on every call."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent import futures
from typing import Any
from uuid import uuid4

from torch import Tensor

from practicum.compat import transferqueue
from practicum.dataplane.transferqueue.tq_servers import Servers
from practicum.errors import DeadlineError, StoreError

_FIELD = "bytes"
_PARTITION = "practicum"
_CHECK_S = 2.0


class BlobMissing(Exception):
    """One of these blobs, which were read together, is not in TransferQueue (any more)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        more = f" or one of {len(names) - 1} more" if len(names) > 1 else ""
        super().__init__(f"blob {names[0]}{more}")


class TransferQueueClient:
    """Puts and gets blobs of bytes. A blob's name is never used twice.

    All blobs are in one partition of TransferQueue: it never frees a partition that is cleared blob by blob,
    and clearing a whole partition would also drop puts in flight.
    """

    def __init__(self, servers: Servers, timeout_s: float) -> None:
        self.servers = servers
        self._broken: str | None = None
        transferqueue.prepare_import(timeout_s)
        address, options = pickle.loads(servers.address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transferqueue", daemon=True)
        self._thread.start()
        self._client = transferqueue.make_client(f"practicum_{uuid4().hex[:12]}", address)
        try:
            opening = asyncio.to_thread(transferqueue.open_storage, self._client, options)
            self.call(opening, "answer the first call", timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        """Return the result of `work`. After a death in TransferQueue this and all later calls fail."""
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
            well = "its processes answer: the cluster is overloaded, or runtime.stage_s is too short"
            why = self.servers.silence() or well
            raise DeadlineError(f"the store waited {timeout_s:g} s for TransferQueue to {what}; {why}")
        try:
            return future.result()
        except (BlobMissing, StoreError):
            raise
        except Exception as error:
            self._raise_if_dead(future)
            why = self.servers.silence() or error
            raise StoreError(f"TransferQueue could not {what}: {why}") from error

    def put(self, name: str, blob: Tensor, timeout_s: float) -> None:
        """Store a blob [n] of bytes."""
        try:
            self.call(self._put(name, blob), f"take {len(blob)} bytes", timeout_s)
        except StoreError:
            # Not after a late put: it may still arrive, where another blob is stored by then.
            if not self._broken:
                self.clear([name], timeout_s)
            raise

    def get(self, names: Sequence[str], timeout_s: float) -> list[Tensor]:
        """Return the blobs of these names; raise `BlobMissing` if one is not there."""
        return self.call(self._get(list(names)), f"return {len(names)} blobs", timeout_s) if names else []

    def clear(self, names: Sequence[str], timeout_s: float) -> None:
        """Forget these blobs; those that are not there are skipped."""
        if names:
            self.call(self._clear(list(names)), f"forget {len(names)} blobs", timeout_s)

    def check(self) -> None:
        """Raise a StoreError if an earlier call found that TransferQueue is broken."""
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
        self._broken = self.servers.death()
        if self._broken is not None:
            future.cancel()
            raise StoreError(self._broken)

    async def _put(self, name: str, blob: Tensor) -> None:
        from tensordict import TensorDict

        meta = await self._client.async_kv_retrieve_meta([name], _PARTITION, create=True)
        data = TensorDict({_FIELD: blob[None]}, batch_size=1)
        await transferqueue.put_data(self._client, data, meta)

    async def _get(self, names: list[str]) -> list[Tensor]:
        meta = await self._client.async_kv_retrieve_meta(names, _PARTITION)
        if meta.size != len(names) or _FIELD not in meta.field_names or not meta.is_ready:
            raise BlobMissing(names)
        data = await transferqueue.get_data(self._client, meta)
        if data is None:
            raise BlobMissing(names)
        return list(data[_FIELD].unbind())

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
    """Return this process's client of these servers, made at the first call and shared by all its stores."""
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
