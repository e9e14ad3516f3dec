"""Weights on their way to a vLLM process: bucket by bucket through memory that both map.

The memory has no name in any folder, so nothing is left behind by a process that is killed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
_ALIGN = 64


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
        held: list[tuple[str, Tensor]] = []
        filled = 0
        for name, tensor in weights:
            size = _aligned(tensor.nbytes)
            if held and filled + size > most:
                yield self._fill(held, filled)
                held, filled = [], 0
            held.append((name, tensor))
            filled += size
        if held:
            yield self._fill(held, filled)

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory.close()
        os.close(self._file)

    def _fill(self, held: list[tuple[str, Tensor]], size: int) -> MemoryBucket:
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


@contextmanager
def opened(bucket: MemoryBucket) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The tensors of a bucket, each a copy: vLLM keeps them until it has all of a layer."""
    file = os.open(bucket.path, os.O_RDWR)
    try:
        memory = mmap.mmap(file, bucket.size)
    finally:
        os.close(file)
    yield ((entry.name, _view(memory, entry).clone()) for entry in bucket.entries)


def _view(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
