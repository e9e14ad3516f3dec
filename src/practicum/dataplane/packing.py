"""Values with tensors as a short pickle and the bytes of the tensors beside it.

Ray keeps the bytes in shared memory, from where tensors are read without a copy.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from practicum.errors import StoreError


class Packed(NamedTuple):
    """A pickle, and the arrays of bytes [n] that it refers to."""

    head: bytes
    buffers: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    def unpack(self) -> Any:
        """Return the value. Its tensors share the buffers' memory and must not be changed."""
        return pickle.loads(self.head, buffers=self.buffers)


def pack(value: Any) -> Packed:
    """Pack a value. Tensors that are contiguous on the CPU are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, 5, buffer_callback=buffers.append).dump(value)
    return Packed(head.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized:
            raise StoreError(f"found a {value.layout} tensor: this store takes dense ones only")
        flat = value.detach().cpu().contiguous().view(-1)
        if flat.stride() != (1,):  # a single value may have any stride, and still counts as contiguous
            flat = flat.clone(memory_format=torch.contiguous_format)
        dtype = str(value.dtype).removeprefix("torch.")
        return _tensor, (flat.view(torch.uint8).numpy(), dtype, tuple(value.shape))


class _Shared:
    """Memory of a read-only array without that mark, of which torch would warn on every read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory
        where, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (where, False)}


def _tensor(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    writable = data if data.flags.writeable else np.asarray(_Shared(data))
    return torch.from_numpy(writable).view(getattr(torch, dtype)).view(shape)
