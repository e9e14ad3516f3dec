"""Weights in memory that other processes of this machine map by a path.

The file has no name in any folder (Linux), so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Named weights in shared memory. Iterating maps them, in any process of this machine."""

    path: str

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(torch.load(self.path, mmap=True, weights_only=True).items())


@contextmanager
def shared_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[SharedWeights]:
    """Write weights to shared memory, where they stay inside the context."""
    tensors = {name: weight.detach().cpu() for name, weight in weights}
    for name, tensor in tensors.items():
        if (
            tensor.untyped_storage().nbytes() != tensor.nbytes
        ):  # a view would be written with its whole storage
            tensors[name] = tensor.clone()
    is_linux = sys.platform == "linux"
    with os.fdopen(os.memfd_create("weights"), "wb") if is_linux else NamedTemporaryFile() as file:
        torch.save(tensors, file)
        tensors.clear()
        file.flush()
        yield SharedWeights(f"/proc/{os.getpid()}/fd/{file.fileno()}" if is_linux else file.name)
