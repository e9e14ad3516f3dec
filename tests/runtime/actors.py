"""Small actors for tests, in a module that Ray's workers can import; without torch they start soon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import ray

from practicum.errors import EngineError, PracticumError, StoreError
from practicum.runtime.ray.actor_calls import ask_async

if TYPE_CHECKING:
    from torch import Tensor

    from practicum.runtime.ray.weight_transport import Manifest, WeightTransport


def start(kind: type, *args: object) -> Any:
    """A handle of a new actor that takes no CPU."""
    return ray.remote(num_cpus=0)(kind).remote(*args)


class Odd(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Caller:
    """Raises what it is given; waits until it is told; asks another."""

    def __init__(self, broken: str = "") -> None:
        self.cancelled = asyncio.Semaphore(0)
        if broken:
            raise EngineError(broken)

    async def pid(self) -> int:
        return os.getpid()

    async def give(self, value: object) -> object:
        return value

    async def breaks(self, error: PracticumError | OSError | ValueError) -> None:
        raise error

    async def breaks_oddly(self) -> None:
        raise Odd("made of ", "two parts")

    async def waits(self) -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled.release()
            raise

    async def counts(self, upto: int, then: str) -> AsyncIterator[int]:
        try:
            for i in range(upto):
                yield i
            if then == "fails":
                raise StoreError("after the last")
            if then == "waits":
                await asyncio.sleep(600)
        except (asyncio.CancelledError, GeneratorExit):  # the latter, if Ray was still sending the last
            self.cancelled.release()
            raise

    async def was_cancelled(self) -> bool:
        return await self.cancelled.acquire()

    async def asks(self, other: list[ray.ObjectRef]) -> None:
        await ask_async(other[0], timeout=60, owner="the worker", who="another")

    async def gets(self, other: list[ray.ObjectRef]) -> None:
        await other[0]


class Publisher:
    """A learner's part in the transport of weights: named tensors, each full of its version's number."""

    def publish(self, version: int, numel: int, transport: WeightTransport = "object_store") -> Manifest:
        import torch

        from practicum.runtime.ray.weight_transport import publish

        weights = ((f"layer.{i}", torch.full((numel,), float(version))) for i in range(4))
        return publish(weights, version, transport, bucket_bytes=8 * numel)

    def publish_kinds(self, transport: WeightTransport) -> tuple[dict[str, Tensor], Manifest]:
        from practicum.runtime.ray.weight_transport import publish

        weights = kinds_of_tensors()
        return weights, publish(weights.items(), 3, transport, bucket_bytes=4096)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    """An engine's part in it."""

    def read(self, manifest: Manifest, timeout: float) -> dict[str, Tensor]:
        from practicum.runtime.ray.weight_transport import receive

        return {name: tensor.clone() for name, tensor in receive(manifest, timeout=timeout)}


def kinds_of_tensors() -> dict[str, Tensor]:
    """All that a model may have, and some more."""
    import torch

    torch.manual_seed(0)
    return {
        "matrix": torch.randn(48, 32),
        "turned": torch.randn(48, 32).T,
        "part": torch.randn(48, 32)[::2, 3:9],
        "half": torch.randn(5, 7, 3).bfloat16(),
        "other half": torch.randn(33).half(),
        "double": torch.randn(9).double(),
        "counts": torch.arange(-3, 4),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "learned": torch.nn.Parameter(torch.randn(4)),
    }


class Desk:
    """A replica: does numbered works, each of which takes as long as it says; tells what it did."""

    def __init__(self, replica: int, generation: int) -> None:
        self.replica, self.generation, self.done = replica, generation, list[int]()

    async def pid(self) -> int:
        return os.getpid()

    async def work(self, number: int, seconds: float) -> tuple[int, int, int]:
        await asyncio.sleep(seconds)
        self.done.append(number)
        return number, self.replica, self.generation

    async def fail(self, error: Exception) -> None:
        raise error

    async def die(self) -> None:
        os._exit(1)
