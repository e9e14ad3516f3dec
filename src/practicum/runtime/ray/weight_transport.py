"""Weights from the learner to engines, in buckets; the controller sees references.

Through Ray's object store: an engine on the learner's node reads them in the shared memory where they were
written, and Ray copies them to another node once, however many engines are there. Or by NIXL: the learner
keeps a copy of them on its device, which engines read from there to theirs, without the host's memory.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import ray
import ray.exceptions
import torch
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError
from torch import Tensor

from practicum.devices import gpu_id
from practicum.errors import DeadlineError, EngineError
from practicum.models.offloaded_weights import in_buckets
from practicum.recipe.schema.runtime_section import WeightTransport

_SAMPLE = 512
"""Bytes at either end of a tensor that its checksum covers: all of them would take too long."""
_FIX = "publish them again, or resume the run from its last checkpoint"
_ALIGNMENT = 16
"""Bytes at whose multiples tensors begin in a bucket that travels as one tensor."""
_DIRECT_ERRORS = getattr(ray.exceptions, "RayDirectTransportError", ())
"""None in a Ray that can't put tensors by NIXL yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together as one Ray object, in the entries' order.

    In the object store it is a list of their bytes; by NIXL it is one tensor of bytes, see `_offsets`.
    """

    ref: ObjectRef[Any]
    entries: tuple[Entry, ...]
    checksum: int
    is_direct: bool
    """Whether it goes by NIXL."""

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was published; small enough for the controller. The bytes live as long as a copy of it."""

    version: int
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def publish(
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    transport: WeightTransport = "object_store",
    *,
    bucket_bytes: int = 64 * 2**20,
) -> Manifest:
    """Copy weights, so that later changes to them do not matter.

    The process that calls this owns the bytes: they die with it. A tensor above bucket_bytes goes alone.
    """
    buckets = in_buckets(weights, bucket_bytes)
    put = [_put_direct(some) if _is_direct(transport, some) else _put(some) for some in buckets]
    return Manifest(version, tuple(put))


def receive(manifest: Manifest, *, timeout: float) -> Iterator[tuple[str, Tensor]]:
    """The weights of a manifest: to copy from, never to write to. They are views on shared memory or, if they
    came by NIXL, on the learner's kind of device.

    An EngineError if they are lost or not what was published, a DeadlineError after the timeout.
    """
    deadline = time.monotonic() + timeout
    what = f"weights of version {manifest.version}"
    for number, bucket in enumerate(manifest.buckets):
        if bucket.is_direct:
            _load_nixl()
        try:
            found = ray.get(bucket.ref, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise DeadlineError(
                f"{what} did not arrive within {timeout:g} s: bucket {number} of {len(manifest.buckets)} "
                f"({bucket.nbytes / 2**20:.1f} MiB) is missing"
            ) from None
        except OwnerDiedError:
            raise EngineError(f"{what} are lost: the learner that published them is gone; {_FIX}") from None
        except ObjectLostError as error:
            raise EngineError(f"{what} are lost: a node with a part is gone ({error}); {_FIX}") from None
        except _DIRECT_ERRORS as error:
            raise EngineError(
                f"{what} did not come by NIXL ({error}); {_FIX}, "
                "or use runtime.weight_transport: object_store"
            ) from None
        pieces = _split(bucket.entries, found) if bucket.is_direct else [_tensor(array) for array in found]
        _check(f"{what}, bucket {number}", bucket, pieces)
        for entry, piece in zip(bucket.entries, pieces, strict=True):
            yield entry.name, piece.view(entry.dtype).view(entry.shape)


def _is_direct(transport: WeightTransport, weights: Sequence[tuple[str, Tensor]]) -> bool:
    if transport != "auto":
        return transport == "nixl"
    can = _DIRECT_ERRORS and importlib.util.find_spec("nixl") is not None
    return bool(can) and gpu_id(weights[0][1].device) is not None


@cache
def _load_nixl() -> None:
    """Before Ray does, so that its absence has a name and it prints nothing when all is well."""
    try:
        import nixl._api  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise EngineError(
            f"runtime.weight_transport: no nixl on {ray.util.get_node_ip_address()} ({error}); "
            "pip install 'practicum[nixl]' on every machine of the cluster, or set it to object_store"
        ) from None
    logging.getLogger("nixl").setLevel(logging.WARNING)


def _put(weights: Sequence[tuple[str, Tensor]]) -> Bucket:
    pieces = [_as_bytes(tensor).cpu() for _, tensor in weights]
    # Ray copies the arrays of a list one after the other, aligned: packing them here would be a second copy.
    ref = ray.put([piece.numpy() for piece in pieces])
    return Bucket(ref, _entries(weights), _checksum(pieces), is_direct=False)


def _put_direct(weights: Sequence[tuple[str, Tensor]]) -> Bucket:
    _load_nixl()
    entries = _entries(weights)
    *_, size = _offsets(entries)
    # NIXL takes no empty memory.
    packed = torch.empty(max(size, 1), dtype=torch.uint8, device=weights[0][1].device)
    pieces = _split(entries, packed)
    for piece, (_, tensor) in zip(pieces, weights, strict=True):
        piece.copy_(_as_bytes(tensor))
    return Bucket(ray.put(packed, _tensor_transport="nixl"), entries, _checksum(pieces), is_direct=True)


def _entries(weights: Sequence[tuple[str, Tensor]]) -> tuple[Entry, ...]:
    return tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _offsets(entries: Sequence[Entry]) -> list[int]:
    """Where each tensor begins in a bucket that is one tensor, and where the last one ends."""
    padded = (-(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT for entry in entries)
    return list(accumulate(padded, initial=0))


def _split(entries: Sequence[Entry], packed: Tensor) -> list[Tensor]:
    return [
        packed[offset : offset + entry.nbytes]
        for offset, entry in zip(_offsets(entries), entries, strict=False)
    ]


def _check(what: str, bucket: Bucket, pieces: Sequence[Tensor]) -> None:
    nbytes = sum(piece.numel() for piece in pieces)
    if (len(pieces), nbytes) != (len(bucket.entries), bucket.nbytes):
        raise EngineError(
            f"{what}: found {len(pieces)} tensors of {nbytes} bytes, "
            f"expected {len(bucket.entries)} of {bucket.nbytes}; publish them again"
        )
    if _checksum(pieces) != bucket.checksum:
        raise EngineError(f"{what}: the bytes are not those that were published; publish them again")


def _checksum(pieces: Sequence[Tensor]) -> int:
    ends = [end for piece in pieces for end in (piece[:_SAMPLE], piece[-_SAMPLE:])]
    return zlib.crc32(torch.cat(ends).cpu().numpy().data)


def _tensor(array: NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():  # torch has no read-only tensors, and says so
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
