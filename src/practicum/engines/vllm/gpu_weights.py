"""Weights of a learner on a GPU on their way to vLLM, by vLLM's own backends: not by the host's memory.

CUDA IPC where both are on one GPU: vLLM reads the learner's memory. NCCL where vLLM is on others. Neither was
ever run by us, for want of a GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from practicum.devices import gpu_id
from practicum.engines.vllm.weight_delivery import BUCKET_BYTES
from practicum.models.offloaded_weights import in_buckets

Way = Literal["memory", "ipc", "nccl"]
_HOST = "127.0.0.1"
Take = Callable[[str, Mapping[str, Any]], None]
"""Has all workers do something with what a backend sends: its name, and its arguments."""


def choose_way(learner: str | None, engine: Sequence[str]) -> Way:
    """How weights on this GPU get to an engine on these ones (`devices.gpu_id`); None and none are hosts."""
    if learner is None or not engine:
        return "memory"
    return "ipc" if tuple(engine) == (learner,) else "nccl"


def send_ipc(weights: Iterable[tuple[str, Tensor]], take: Take) -> None:
    """Send handles of the weights' memory, a bucket at a time: those that were received for it (by Ray) are
    not all on the GPU at once. torch keeps memory whose handle was sent until the reader has let go of it."""
    for some in in_buckets(weights, BUCKET_BYTES):
        kept = [(name, tensor.detach().contiguous()) for name, tensor in some]
        handles = [{gpu_id(tensor.device): reduce_tensor(tensor)[1]} for _, tensor in kept]
        take("ipc", {**_described(kept), "ipc_handles": handles})


class GroupSender:
    """The learner's end of a process group with all workers of an engine on this machine."""

    def __init__(self, workers: int, begin: Take, take: Take) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self._source = _Weights()
        group = NCCLTrainerInitInfo(
            master_address=_HOST, master_port=_free_port(), world_size=workers + 1, rank=0, packed=True
        )
        self._trainer = NCCLTrainerWeightTransferEngine.trainer_init(
            group, client=_Client(begin, take), source=self._source
        )

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast the weights; workers take them meanwhile."""
        self._source.weights = dict(weights)
        try:
            self._trainer.send_weights()
        finally:
            self._source.weights = {}

    def close(self) -> None:
        """Leave the group."""
        self._trainer.shutdown()


class _Weights:
    """A `WeightSource` of vLLM: what is sent next."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta  # pyright: ignore[reportMissingImports]

        return [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())


class _Client:
    """What vLLM's sender calls to reach the workers; the engine begins and ends the load itself."""

    def __init__(self, begin: Take, take: Take) -> None:
        self._begin, self._take = begin, take

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._begin("nccl", init_info)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._take("nccl", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]


def _described(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }
