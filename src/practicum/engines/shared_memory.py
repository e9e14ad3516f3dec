"""Weights in memory that other processes of this machine map by a path.

The file has no name in any folder (Linux), so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile
from typing import IO

import torch
from torch import Tensor


@contextmanager
def shared_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Write weights to memory. Yields their path, which is valid inside the block."""
    tensors = {name: _alone(weight.detach().cpu()) for name, weight in weights}
    with _memory_file() as (file, path):
        torch.save(tensors, file)
        tensors.clear()
        file.flush()
        yield path


def read_weights(path: str) -> Iterable[tuple[str, Tensor]]:
    """Map the weights that `shared_weights` wrote."""
    return torch.load(path, mmap=True, weights_only=True).items()


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor without the rest of the memory that it is a view of, which would be written too."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def _memory_file() -> Iterator[tuple[IO[bytes], str]]:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("practicum-weights"), "wb") as file:
            yield file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with NamedTemporaryFile() as named:
            yield named.file, named.name
