"""The sending side of weights for vLLM: through memory to its loaders, or by its own backends from a GPU.

`worker` is the receiving side. The GPU backends (CUDA IPC for an engine on the learner's GPU, NCCL for an
engine on several others) have not been run by us.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from types import SimpleNamespace
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
        self._weights: dict[str, Tensor] = {}
        self._trainer: Any = None

    def send(self, weights: Weights) -> None:
        """Send all weights."""
        if self._backend is not None:
            self._weights = {name: tensor.detach() for name, tensor in weights}
            try:
                if all(tensor.is_cuda for tensor in self._weights.values()):
                    self._trainer = self._trainer or self._make_trainer(self._backend)
                    self._trainer.send_weights()
                    return
                weights = self._weights.items()
            finally:
                self._weights = {}
        with shared_weights(weights) as shared:
            self.load_file(shared.path)

    def load_file(self, path: str | None) -> None:
        """Have all workers load a file of `shared_weights`, or the model's folder."""
        errors = self._call("collective_rpc", "practicum_load", args=(path,))
        if error := next(filter(None, errors), None):
            raise EngineError(error)

    def close(self) -> None:
        """Leave the process group."""
        if self._trainer is not None:
            self._trainer.shutdown()

    def _make_trainer(self, backend: str) -> Any:
        from vllm.distributed.weight_transfer import (
            base,
            factory,
            ipc_engine,
            nccl_engine,
        )

        call = self._call
        if backend == "ipc":
            info = ipc_engine.IPCTrainerInitInfo(rank=0, packed=True)
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", port, self._workers + 1, rank=0)
        client = SimpleNamespace(
            init_weight_transfer_engine=lambda info: call(
                "init_weight_transfer_engine", base.WeightTransferInitRequest(info)
            ),
            start_weight_update=lambda: call("start_weight_update"),
            update_weights=lambda info: call("update_weights", base.WeightTransferUpdateRequest(info)),
            finish_weight_update=lambda version=None: call("finish_weight_update", version),
        )
        # vLLM 0.32 and 0.33 have different protocols for other sources.
        source = base.ModuleSource(SimpleNamespace(named_parameters=lambda: self._weights.items()))
        return factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
