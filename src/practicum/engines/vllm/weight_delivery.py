"""Buckets of weights from the process's event loop to the thread that loads them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator

from torch import Tensor

from practicum.engines.vllm.weight_blocks import MemoryBucket, opened

_BUCKET_S = 120.0
"""How long a load waits for its next bucket."""


class WeightDelivery:
    """The buckets of one load. All but `tensors` is called in the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[tuple[MemoryBucket, asyncio.Future[None]] | str | None] = (
            queue.SimpleQueue()
        )
        self._unread: set[asyncio.Future[None]] = set()
        self._over = False

    async def hand_over(self, bucket: MemoryBucket | None) -> None:
        """Give the load its next bucket, and wait until it was read or the load is over. None ends it."""
        if self._over:
            return
        if bucket is None:
            self._queue.put(None)
            return
        read = self._loop.create_future()
        self._unread.add(read)
        self._queue.put((bucket, read))
        await read

    def close(self, why: str) -> None:
        """The load is over, or is to be: nobody waits for it any more, and it waits for nothing."""
        self._over = True
        self._queue.put(why)
        for read in self._unread:
            _done(read)
        self._unread.clear()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as they come, in the thread that loads them."""
        while (found := self._next()) is not None:
            bucket, read = found
            with opened(bucket) as tensors:
                yield from tensors
            self._loop.call_soon_threadsafe(_done, read)

    def _next(self) -> tuple[MemoryBucket, asyncio.Future[None]] | None:
        try:
            found = self._queue.get(timeout=_BUCKET_S)
        except queue.Empty:
            raise TimeoutError(f"no bucket of weights came for {_BUCKET_S:g} s") from None
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


def _done(read: asyncio.Future[None]) -> None:
    if not read.done():
        read.set_result(None)
