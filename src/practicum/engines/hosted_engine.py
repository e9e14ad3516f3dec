"""An engine in a separate process. Only tokens are exchanged. Sessions, tools and rewards stay in this
process.

With a lag, engine and learner run concurrently. In one process, they would compete for Python's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, TypeVarTuple

from torch import Tensor

from practicum.engines.protocol import (
    LOGPROBS_ONLY,
    Engine,
    GenerateRequest,
    Generation,
    Memory,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.shared_memory import shared_weights
from practicum.models.attention import OutputHead
from practicum.processes.host import Host

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class HostedEngine(Engine):
    """An engine of a host, by number. See `protocol.Engine`."""

    def __init__(self, host: Host, number: int = 0) -> None:
        self.host, self._number = host, number
        self.version = 0

    def ready(self) -> None:
        self.host.ready()

    @property
    def threads(self) -> int:
        return self.host.threads

    def describe(self) -> list[str]:
        host = self.host
        threads = f"{host.threads} thread{'s' * (host.threads > 1)}"
        return [f"{host.who} works in process {host.pid} with {threads}", *self._call(Engine.describe)]

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self.host.ask(Engine.generate, request, target=self._number)

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        return await self.host.ask(Engine.score, request, options, target=self._number)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with shared_weights(weights) as shared:
            self._call(Engine.load_weights, shared, version)
        self.version = version

    def head(self) -> OutputHead:
        return self._call(Engine.head)

    def sleep(self) -> Memory:
        return self._call(Engine.sleep)

    def wake(self) -> None:
        self._call(Engine.wake)

    def memory(self) -> Memory:
        return self._call(Engine.memory)

    def fingerprint(self) -> Tensor:
        return self._call(Engine.fingerprint)

    def abort(self, why: str) -> None:
        self.host.kill(why)

    def close(self) -> None:
        self.host.close()

    def _call(self, method: Callable[[Any, *Ts], T], *args: *Ts) -> T:
        return self.host.call(method, *args, target=self._number)
