"""Weights in memory that two processes map: one writes all of them, then the other copies them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 64


class SharedTensor(NamedTuple):
    """Where a tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SharedWeights(NamedTuple):
    """For the other process; good as long as the block that wrote them."""

    path: str
    size: int
    tensors: list[SharedTensor]


@contextmanager
def share_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[SharedWeights]:
    """Write weights where another process can read them inside of the block."""
    given, size, entries = dict(weights), 0, list[SharedTensor]()
    for name, tensor in given.items():
        entries.append(SharedTensor(name, tensor.dtype, tuple(tensor.shape), size))
        size += -(-tensor.nbytes // _ALIGN) * _ALIGN
    size = max(size, _ALIGN)
    with _memory_file(size) as (path, file):
        memory = mmap.mmap(file, size)
        for entry in entries:
            _view(memory, entry).copy_(given[entry.name].detach())
        yield SharedWeights(path, size, entries)


def read_weights(shared: SharedWeights) -> Iterator[tuple[str, Tensor]]:
    """The weights as they lie in the memory: to be copied before the writer's block ends."""
    file = os.open(shared.path, os.O_RDWR)
    try:
        memory = mmap.mmap(file, shared.size)
    finally:
        os.close(file)
    for entry in shared.tensors:
        yield entry.name, _view(memory, entry)


def _view(memory: mmap.mmap, entry: SharedTensor) -> Tensor:
    count = prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(memory, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)


@contextmanager
def _memory_file(size: int) -> Iterator[tuple[str, int]]:
    """A file in memory without a name in any folder, so a process that is killed leaves nothing behind.

    Where the system has no such files, a temporary one.
    """
    if not hasattr(os, "memfd_create"):
        with NamedTemporaryFile() as named:
            named.truncate(size)
            yield named.name, named.fileno()
        return
    file = os.memfd_create("practicum-weights")
    try:
        os.ftruncate(file, size)
        yield f"/proc/{os.getpid()}/fd/{file}", file
    finally:
        os.close(file)
