"""Torch engines in a process of their own: the process's side. `engine_process` is the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import torch

from practicum.devices import count_cores
from practicum.engines.shared_memory import MemoryBucket, SharedReader
from practicum.engines.torch.engine_thread import share_order
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.processes.child_main import ChildRequest, serve


class EngineFacts(NamedTuple):
    """What the process says of its engines when they are there."""

    dtype: str
    invariant: bool
    """Whether numbers do not depend on what else is in the batch."""
    alone: bool
    """Whether they do, and each sequence is computed alone."""
    threads: int


class EngineSetup(NamedTuple):
    """How to make the engines: by a function of a module, or a `functools.partial` of one."""

    load: Callable[[], Sequence[TorchEngine]]
    threads: int


def main(pipe: Connection, setup: EngineSetup) -> None:
    """Run the process from its start to its end."""
    serve(pipe, lambda: _start(setup))


def _start(setup: EngineSetup) -> tuple[ServedEngines, EngineFacts]:
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(setup.threads)
    disable_progress_bar()  # the learner's process shows its own
    engines = setup.load()
    # While the learner waits, its cores are free: engines of two steps then work at the same time.
    share_order((engine.thread for engine in engines), max(1, count_cores() // setup.threads))
    runner = engines[0].runner
    return ServedEngines(engines), EngineFacts(
        str(runner.model.dtype), runner.invariant, engines[0].alone, torch.get_num_threads()
    )


class ServedEngines:
    """One engine for each copy of the weights. Requests name the copy, and what is asked of it."""

    WORK: ClassVar[frozenset[str]] = frozenset({"generate", "score"})

    def __init__(self, engines: Sequence[TorchEngine]) -> None:
        self._engines = engines

    async def answer(self, request: ChildRequest) -> Any:
        """The answer to one of the requests that `EngineProcess` sends."""
        if request.what == "alive":
            return max(engine.thread.step_s for engine in self._engines)
        copy, *args = request.args
        engine = self._engines[copy]
        if request.what in self.WORK:
            return await getattr(engine, request.what)(*args)
        # These may wait for a step of the engine, which others must not wait for.
        return await asyncio.to_thread(_CALLS[request.what], engine, *args)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def _load(engine: TorchEngine, bucket: MemoryBucket, version: int) -> None:
    engine.load_weights(SharedReader().tensors(bucket), version)


_CALLS: dict[str, Callable[..., Any]] = {
    "load": _load,
    "sleep": TorchEngine.sleep,
    "wake": TorchEngine.wake,
    "memory": TorchEngine.memory,
    "fingerprint": TorchEngine.fingerprint,
}
