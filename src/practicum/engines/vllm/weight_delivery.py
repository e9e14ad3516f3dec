"""Weights on their way to a vLLM process: bucket by bucket through memory that both processes map.

The memory has no name in any folder, so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import queue
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from practicum.models.offloaded_weights import in_buckets

BUCKET_BYTES = 64 * 2**20
_ALIGN = 64
_BUCKET_S = 120.0
"""How long a load waits for its next bucket."""


class TensorEntry(NamedTuple):
    """Where a tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class MemoryBucket(NamedTuple):
    """Tensors in shared memory; its path is good as long as the process that wrote them lives."""

    path: str
    size: int
    entries: list[TensorEntry]


class SharedBlock:
    """Shared memory that is filled again and again; it grows to the largest tensor."""

    def __init__(self) -> None:
        self._file = os.memfd_create("practicum-weights")
        self._memory: mmap.mmap | None = None
        self._size = 0

    def buckets(
        self, weights: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES
    ) -> Iterator[MemoryBucket]:
        """Fill the memory; each bucket must have been read before the next one is asked for."""
        return map(self._fill, in_buckets(weights, most))

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory.close()
        os.close(self._file)

    def _fill(self, held: list[tuple[str, Tensor]]) -> MemoryBucket:
        size = sum(_aligned(tensor.nbytes) for _, tensor in held)
        if size > self._size:
            os.ftruncate(self._file, size)
            self._memory, self._size = mmap.mmap(self._file, size), size
        assert self._memory is not None
        entries, at = [], 0
        for name, tensor in held:
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), at))
            if tensor.numel():
                _view(self._memory, entries[-1]).copy_(tensor.detach())
            at += _aligned(tensor.nbytes)
        return MemoryBucket(f"/proc/{os.getpid()}/fd/{self._file}", size, entries)


def read_bucket(bucket: MemoryBucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, each a copy: vLLM keeps them until it has all of a layer."""
    file = os.open(bucket.path, os.O_RDWR)
    try:
        memory = mmap.mmap(file, bucket.size)
    finally:
        os.close(file)
    for entry in bucket.entries:
        yield entry.name, _view(memory, entry).clone()


def _view(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


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
        """End the load: its senders stop waiting, and it stops waiting for buckets."""
        self._over = True
        self._queue.put(why)
        for read in self._unread:
            _done(read)
        self._unread.clear()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as they come, in the thread that loads them."""
        while (received := self._next()) is not None:
            bucket, read = received
            yield from read_bucket(bucket)
            self._loop.call_soon_threadsafe(_done, read)

    def _next(self) -> tuple[MemoryBucket, asyncio.Future[None]] | None:
        try:
            message = self._queue.get(timeout=_BUCKET_S)
        except queue.Empty:
            raise TimeoutError(f"no bucket of weights came for {_BUCKET_S:g} s") from None
        if isinstance(message, str):
            raise RuntimeError(message)
        return message


def _done(read: asyncio.Future[None]) -> None:
    if not read.done():
        read.set_result(None)
