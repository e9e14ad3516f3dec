"""The sending side of weights for vLLM: through memory to its loaders, or by its own backends from a GPU.

`worker` is the receiving side. The GPU backends (CUDA IPC for an engine on the learner's GPU, NCCL for an
engine on several others) have not been run by us.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from practicum.engines.shared_memory import shared_weights
from practicum.errors import EngineError

Weights = Iterable[tuple[str, Tensor]]
Call = Callable[..., Any]
"""Calls a method of AsyncLLM by its name and waits for its result."""


class WeightSender:
    """Sends one set of weights after another. `backend` is vLLM's own on a GPU ("ipc", "nccl")."""

    def __init__(self, call: Call, workers: int, backend: str | None) -> None:
        self._call, self._workers, self._backend = call, workers, backend
        self._source = _Source()
        self._trainer: Any = None

    def send(self, weights: Weights) -> None:
        """Send all weights."""
        weights = iter(weights)
        first = next(weights, None)
        if first is None:
            raise EngineError("no weights to load")
        weights = chain([first], weights)
        if self._backend is not None and first[1].is_cuda:
            self._send_from_gpu(weights)
            return
        with shared_weights(weights) as path:
            self.load_file(path)

    def load_file(self, path: str | None) -> None:
        """Have all workers load a file of `shared_weights`, or the model's folder."""
        errors = self._call("collective_rpc", "practicum_load", args=(path,))
        if error := next(filter(None, errors), None):
            raise EngineError(error)

    def close(self) -> None:
        """Leave the process group."""
        if self._trainer is not None:
            self._trainer.shutdown()

    def _send_from_gpu(self, weights: Weights) -> None:
        if self._trainer is None:
            self._trainer = self._make_trainer()
        self._source.weights = {name: tensor.detach() for name, tensor in weights}
        try:
            self._trainer.send_weights()
        finally:
            self._source.weights = {}
        self._call("collective_rpc", "practicum_repack")

    def _make_trainer(self) -> Any:
        from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
            WeightTransferTrainerFactory,
        )
        from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
            IPCTrainerInitInfo,
        )
        from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
            NCCLTrainerInitInfo,
        )

        if self._backend == "ipc":
            info = IPCTrainerInitInfo(rank=0, packed=True)
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            info = NCCLTrainerInitInfo("127.0.0.1", port, self._workers + 1, rank=0)
        return WeightTransferTrainerFactory.trainer_init(
            info, client=_Client(self._call), source=self._source
        )


class _Source:
    """vLLM's `WeightSource`: the weights that are sent next."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta  # pyright: ignore[reportMissingImports]

        return [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())


class _Client:
    """vLLM's `VLLMWeightSyncClient` for an AsyncLLM in this process."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferInitRequest,
        )

        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferUpdateRequest,
        )

        self._call("update_weights", WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)
