"""Memory pages that slots have in common: the system copies one when a slot writes to it.

So the keys and values of a prompt are stored once and stay in the processor's cache, while each slot is an
ordinary tensor to which they belong. Needs Linux and a CPU. Elsewhere, slots have copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 2**16
"""Fewer bytes of a head are faster copied."""
MOST_MAPPINGS = 2**15
"""Maximum mappings of a KV memory, half of what Linux allows a process."""
_AT_THIS_ADDRESS = 0x10
"""Linux's MAP_FIXED, which Python's mmap does not have."""


class SharedPages:
    """The beginning of slots in a file without a name: keys and values [layers, kv heads, positions, D]."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.positions = parts[0].shape[2]
        self._file = open(os.memfd_create("kv"), "wb")  # noqa: SIM115 - mapped as long as a slot needs it
        self._starts = [sum(x.nbytes for x in parts[:i]) for i in range(len(parts))]
        for part in parts:
            self._file.write(part.contiguous().view(torch.uint8).numpy().data)
        self._file.flush()

    def put(self, number: int, slot: Tensor) -> None:
        """Replace the beginning of a slot [layers, kv heads, positions, D] by part `number`."""
        layers, heads, _, width = slot.shape
        size = self.positions * width * slot.itemsize
        for layer, head in product(range(layers), range(heads)):
            address = slot.data_ptr() + (layer * slot.stride(0) + head * slot.stride(1)) * slot.itemsize
            start = self._starts[number] + (layer * heads + head) * size
            access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _AT_THIS_ADDRESS
            if _libc().mmap(address, size, access, kind, self._file.fileno(), start) != address:
                raise OSError(ctypes.get_errno(), "the keys and values of a prompt can't be mapped")


def shareable(memories: Sequence[Tensor], length: int) -> int:
    """Return how many of the first `length` positions slots can share, in memories [layers, slots, kv heads,
    positions, D] of `lazy_zeros`: whole pages, or 0."""
    widths = [x.shape[-1] * x.itemsize for x in memories]
    steps = [mmap.PAGESIZE // gcd(mmap.PAGESIZE, width) for width in widths]  # powers of two
    count = length // max(steps) * max(steps)
    is_possible = (
        sys.platform == "linux"
        and all(x.device.type == "cpu" and x.shape[3] % max(steps) == 0 for x in memories)
        and count * min(widths) >= LEAST_BYTES
        # Each head's mapping leaves another one after it.
        and sum(2 * x[..., 0, 0].numel() for x in memories) <= MOST_MAPPINGS
    )
    return count if is_possible else 0


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc
