"""Weights from the learner to engines, in buckets through Ray's object store; the controller sees references.

An engine on the learner's node reads them in the shared memory where they were written; Ray copies them to
another node once, however many engines are there.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError
from torch import Tensor

from practicum.errors import DeadlineError, EngineError
from practicum.models.offloaded_weights import in_buckets

_SAMPLE = 512
"""Bytes at either end of a tensor that its checksum covers: all of them would take too long."""
_FIX = "publish them again, or resume the run from its last checkpoint"
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together as one Ray object: a list of their bytes, in the entries' order."""

    ref: ObjectRef[Any]
    entries: tuple[Entry, ...]
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was published; small enough for the controller. The bytes live as long as a copy of it."""

    version: int
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def publish(
    weights: Iterable[tuple[str, Tensor]], version: int, *, bucket_bytes: int = 64 * 2**20
) -> Manifest:
    """Copy weights from any device into Ray's object store; later changes to them do not matter.

    The process that calls this owns the bytes: they die with it. A tensor above bucket_bytes goes alone.
    """
    return Manifest(version, tuple(map(_put, in_buckets(weights, bucket_bytes))))


def receive(manifest: Manifest, *, timeout: float) -> Iterator[tuple[str, Tensor]]:
    """The weights of a manifest, as views on shared memory: to copy from, never to write to.

    An EngineError if they are lost or not what was published, a DeadlineError after the timeout.
    """
    deadline = time.monotonic() + timeout
    what = f"weights of version {manifest.version}"
    for number, bucket in enumerate(manifest.buckets):
        try:
            arrays = ray.get(bucket.ref, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise DeadlineError(
                f"{what} did not arrive within {timeout:g} s: bucket {number} of {len(manifest.buckets)} "
                f"({bucket.nbytes / 2**20:.1f} MiB) is missing"
            ) from None
        except OwnerDiedError:
            raise EngineError(f"{what} are lost: the learner that published them is gone; {_FIX}") from None
        except ObjectLostError as error:
            raise EngineError(f"{what} are lost: a node with a part is gone ({error}); {_FIX}") from None
        _check(f"{what}, bucket {number}", bucket, arrays)
        for entry, array in zip(bucket.entries, arrays, strict=True):
            yield entry.name, _tensor(array).view(entry.dtype).view(entry.shape)


def _put(weights: Sequence[tuple[str, Tensor]]) -> Bucket:
    entries = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)
    arrays = [x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for _, x in weights]
    # Ray copies the arrays of a list one after the other, aligned: packing them here would be a second copy.
    return Bucket(ray.put(arrays), entries, sum(array.nbytes for array in arrays), _checksum(arrays))


def _check(what: str, bucket: Bucket, arrays: Sequence[_Bytes]) -> None:
    nbytes = sum(array.nbytes for array in arrays)
    if (len(arrays), nbytes) != (len(bucket.entries), bucket.nbytes):
        raise EngineError(
            f"{what}: found {len(arrays)} tensors of {nbytes} bytes, "
            f"expected {len(bucket.entries)} of {bucket.nbytes}; publish them again"
        )
    if _checksum(arrays) != bucket.checksum:
        raise EngineError(f"{what}: the bytes are not those that were published; publish them again")


def _checksum(arrays: Sequence[_Bytes]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array[:_SAMPLE].data, checksum)
        checksum = zlib.crc32(array[-_SAMPLE:].data, checksum)
    return checksum


def _tensor(array: _Bytes) -> Tensor:
    with warnings.catch_warnings():  # torch has no read-only tensors, and says so
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
