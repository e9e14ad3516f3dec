"""Torch engines in a process of their own: the process's side. `engine_process` is the caller's.

Tensors travel as numpy arrays: pickled tensors would bring all of the memory that they are views of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from practicum.engines.protocol import (
    Counter,
    Finish,
    GenerateRequest,
    Generation,
    Memory,
    Sampling,
    ScoreOptions,
    ScoreRequest,
)
from practicum.engines.torch.engine_thread import share_order
from practicum.engines.torch.shared_weights import SharedWeights, read_weights
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.images import Images
from practicum.processes.child_main import ChildRequest, serve

Array = np.ndarray[Any, Any]


class SentPrompt(NamedTuple):
    """A `GenerateRequest`; pictures are pixels and grid."""

    ids: list[int]
    sampling: Sampling
    counter: Counter
    images: tuple[Array, Array] | None
    experts: Array | None
    keep: bool


class SentGeneration(NamedTuple):
    """A `Generation`."""

    tokens: Array
    logprobs: Array
    plain: Array
    finish: Finish
    version: int
    experts: Array | None


class SentScores(NamedTuple):
    """The `Scores` of a sequence."""

    logprobs: Array
    topk_ids: Array | None
    topk_logprobs: Array | None
    version: int
    hidden: Array | None


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
    share_order(engine.thread for engine in engines)
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
        if request.what == "generate":
            return await _generate(engine, *args)
        if request.what == "score":
            return await _score(engine, *args)
        # These may wait for a step of the engine, which others must not wait for.
        return await asyncio.to_thread(_CALLS[request.what], engine, *args)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


async def _generate(engine: TorchEngine, asked: SentPrompt) -> SentGeneration:
    images = None if asked.images is None else Images(*map(torch.from_numpy, asked.images))
    experts = as_tensor(asked.experts)
    request = GenerateRequest(
        asked.ids, asked.sampling, asked.counter, images=images, experts=experts, keep=asked.keep
    )
    made: Generation = await engine.generate(request)
    tokens, logprobs, plain = (x.numpy() for x in (made.tokens, made.logprobs, made.plain_logprobs))
    return SentGeneration(tokens, logprobs, plain, made.finish, made.version_min, as_array(made.experts))


async def _score(
    engine: TorchEngine, asked: ScoreRequest, images: tuple[Array, Array] | None, options: ScoreOptions
) -> SentScores:
    pictures = None if images is None else Images(*map(torch.from_numpy, images))
    request = ScoreRequest(asked.ids, asked.start, asked.name, pictures, asked.adapter)
    found = await engine.score(request, options)
    top = as_array(found.topk_ids), as_array(found.topk_logprobs)
    return SentScores(found.logprobs.numpy(), *top, found.version, as_array(found.hidden))


def _load(engine: TorchEngine, shared: SharedWeights, version: int) -> None:
    engine.load_weights(read_weights(shared), version)


def _sleep(engine: TorchEngine) -> Memory:
    return engine.sleep()


def _fingerprint(engine: TorchEngine) -> Array:
    return engine.fingerprint().cpu().numpy()


_CALLS: dict[str, Callable[..., Any]] = {
    "load": _load,
    "sleep": _sleep,
    "wake": TorchEngine.wake,
    "memory": TorchEngine.memory,
    "fingerprint": _fingerprint,
}


def as_array(tensor: Tensor | None) -> Array | None:
    """For the other process."""
    return None if tensor is None else tensor.detach().cpu().numpy()


def as_tensor(array: Array | None) -> Tensor | None:
    """From the other process."""
    return None if array is None else torch.from_numpy(array)
