"""Weights in memory that several processes map: one writes them, the others read them.

The memory has no name in any folder, so a process that is killed leaves nothing behind. It can be filled
again and again: pages of new memory cost more than what is written to them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from math import prod
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 64
"""Bytes: where tensors may begin."""


class MemoryPlace(NamedTuple):
    """Shared memory; the path is good as long as the process that made it lives."""

    path: str
    size: int
    inode: int


class TensorEntry(NamedTuple):
    """Where a tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class MemoryBucket(NamedTuple):
    """Weights by their names."""

    place: MemoryPlace
    entries: list[TensorEntry]


class SharedBlock:
    """Shared memory that is filled again and again; it grows to what is asked of it."""

    def __init__(self) -> None:
        # Where the system has no files in memory alone, a temporary one.
        self._named = None if hasattr(os, "memfd_create") else NamedTemporaryFile()  # noqa: SIM115
        self._file = os.memfd_create("practicum-weights") if self._named is None else self._named.fileno()
        self._memory: mmap.mmap | None = None
        self._size = 0

    @property
    def place(self) -> MemoryPlace:
        """For other processes."""
        path = f"/proc/{os.getpid()}/fd/{self._file}" if self._named is None else self._named.name
        return MemoryPlace(path, self._size, os.fstat(self._file).st_ino)

    def fill(self, weights: Sequence[tuple[str, Tensor]]) -> MemoryBucket:
        """Write all of these weights; what was written before must have been read."""
        self.reserve(sum(aligned(tensor.nbytes) for _, tensor in weights))
        entries, at = [], 0
        for name, tensor in weights:
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), at))
            self.view(dtype, tuple(tensor.shape), at).copy_(tensor.detach())
            at += aligned(tensor.nbytes)
        return MemoryBucket(self.place, entries)

    def reserve(self, size: int) -> None:
        """Have at least this many bytes; what others have mapped stays theirs."""
        if size > self._size:
            os.ftruncate(self._file, size)
            self._memory, self._size = mmap.mmap(self._file, size), size

    def view(self, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
        """The numbers of this type that begin at an offset."""
        return _view(self._memory, dtype, shape, offset)

    def close(self) -> None:
        """Give the memory back."""
        self._memory = None
        if self._named is None:
            os.close(self._file)
        else:
            self._named.close()


class SharedReader:
    """The same memory in another process; it stays mapped."""

    def __init__(self) -> None:
        self._place: MemoryPlace | None = None
        self._memory: mmap.mmap | None = None

    def tensor(self, place: MemoryPlace, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
        """What is there now: the next bucket will be in its place."""
        if place != self._place and place.size:
            file = os.open(place.path, os.O_RDWR)
            try:
                self._memory, self._place = mmap.mmap(file, place.size), place
            finally:
                os.close(file)
        return _view(self._memory, dtype, shape, offset)

    def tensors(self, bucket: MemoryBucket) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a bucket by its name, as it lies there."""
        for entry in bucket.entries:
            yield entry.name, self.tensor(bucket.place, entry.dtype, entry.shape, entry.offset)


def aligned(size: int) -> int:
    """Rounded up to where the next tensor may begin."""
    return -(-size // _ALIGN) * _ALIGN


def _view(memory: mmap.mmap | None, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    kind, count = getattr(torch, dtype), prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    assert memory is not None
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape)
