"""Send weights from the learner to engines, in buckets. The controller holds references only.

Through Ray's object store: an engine on the learner's node reads them in the shared memory where they were
written, and Ray copies them to another node once, however many engines it has. Or by NIXL: the learner keeps
a copy on its device, which engines read from there to theirs, without the host's memory.

Buckets have no checksum: objects in Ray's store never change, and `SyncProbe` compares the logprobs of
learner and engines after each sync, which covers the whole way into the engine.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError
from torch import Tensor

from practicum.compat.ray import DIRECT_ERRORS, HAS_DIRECT, put_direct
from practicum.dataplane.packing import Packed, pack
from practicum.devices import gpu_id
from practicum.errors import DeadlineError, EngineError
from practicum.models.offloaded_weights import in_buckets

_FIX = "publish them again, or resume the run from its last checkpoint"

WeightTransport = Literal["auto", "object_store", "nixl"]
"""Through the host's memory, from device to device, or auto: nixl for weights on a GPU if it is installed."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together as one Ray object: packed or, by NIXL, each as it is."""

    ref: ObjectRef[Any]
    nbytes: int
    is_direct: bool = False
    """True if it goes by NIXL."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The references to published weights. The bytes live as long as a copy of it."""

    version: int
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def publish(
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    transport: WeightTransport = "auto",
    *,
    bucket_bytes: int = 64 * 2**20,
) -> Manifest:
    """Copy weights, so that later changes to them do not matter. The process that calls this owns the bytes:
    they die with it. A tensor above bucket_bytes goes alone."""
    buckets = []
    for tensors in in_buckets(weights, bucket_bytes):
        if transport == "nixl" or (transport == "auto" and _can_go_direct(tensors[0][1])):
            _load_nixl()
            copies = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors
            }
            nbytes = sum(copy.nbytes for copy in copies.values())
            buckets.append(Bucket(put_direct(copies), nbytes, is_direct=True))
        else:
            packed = pack(dict(tensors))
            buckets.append(Bucket(ray.put(packed), packed.nbytes))
    return Manifest(version, tuple(buckets))


def receive(manifest: Manifest, *, timeout: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a manifest. Raise an EngineError if they are lost. The caller must not change
    them: they are views of shared memory or, by NIXL, of a device's memory."""
    deadline = time.monotonic() + timeout
    what = f"weights of version {manifest.version}"
    for number, bucket in enumerate(manifest.buckets):
        if bucket.is_direct:
            _load_nixl()
        try:
            received: Packed | dict[str, Tensor] = ray.get(
                bucket.ref, timeout=max(0.0, deadline - time.monotonic())
            )
        except GetTimeoutError:
            raise DeadlineError(
                f"{what} did not arrive within {timeout:g} s: bucket {number} of {len(manifest.buckets)} "
                f"({bucket.nbytes / 2**20:.1f} MiB) is missing"
            ) from None
        except OwnerDiedError:
            raise EngineError(f"{what} are lost: the learner that published them has ended; {_FIX}") from None
        except ObjectLostError as error:
            raise EngineError(
                f"{what} are lost: a node that held part of them is gone ({error}); {_FIX}"
            ) from None
        except DIRECT_ERRORS as error:
            raise EngineError(
                f"{what} did not come by NIXL ({error}); {_FIX}, or uninstall nixl where the learner runs"
            ) from None
        yield from (received.unpack() if isinstance(received, Packed) else received).items()


def _can_go_direct(tensor: Tensor) -> bool:
    return HAS_DIRECT and importlib.util.find_spec("nixl") is not None and gpu_id(tensor.device) is not None


@cache
def _load_nixl() -> None:
    """Import it before Ray does, so that its absence has a name and it prints nothing when all is well."""
    try:
        import nixl._api  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise EngineError(
            f"no nixl on {ray.util.get_node_ip_address()} ({error}); "
            "pip install 'practicum[nixl]' on every machine of the cluster, or on none"
        ) from None
    logging.getLogger("nixl").setLevel(logging.WARNING)
