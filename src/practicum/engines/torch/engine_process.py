"""Torch engines in a process of their own, as callers use them; the process's side is `served_engines`.

With a lag an engine and a learner work at once, and in one process they would take turns at Python's
interpreter. So engines have their own one: tokens go out, tokens come back, those of one turn of the event
loop in one message. Sessions, tools and rewards stay with the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from torch import Tensor

from practicum.engines.protocol import (
    LOGPROBS_ONLY,
    GenerateRequest,
    Generation,
    Memory,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.shared_memory import SharedBlock
from practicum.engines.torch import served_engines
from practicum.engines.torch.served_engines import EngineFacts, EngineSetup
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.processes.child_process import ChildProcess, end_processes

WHO = "the torch engine"
_START_S = 300.0
_ALIVE_S, _EVERY_S = 60.0, 5.0
"""Seconds in which the process must answer that it is alive, and how often it is asked while it works."""


class EngineProcess:
    """Starts the process; `engines` has one for each copy of the weights, once it is `ready`.

    `load` makes the engines there: a function of a module, or a `functools.partial` of one. Whatever takes
    longer than `deadline_s` ends the process: a call, or one step of an engine.
    """

    def __init__(
        self, load: Callable[[], Sequence[TorchEngine]], copies: int, *, threads: int, deadline_s: float
    ) -> None:
        self._deadline_s, self._alive_s = deadline_s, min(_ALIVE_S, deadline_s)
        self.engines = [ProcessEngine(self, copy) for copy in range(copies)]
        # In the environment from the start: torch reads the number of threads when it is imported.
        env = {"OMP_NUM_THREADS": str(threads)}
        setup = EngineSetup(load, threads)
        self._child = ChildProcess(WHO, served_engines.main, setup, error=EngineError, env=env)
        self._open, self._idle = 0, asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False
        self._child.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def ready(self) -> EngineFacts:
        """What the engines are like; waits until they are there."""
        try:
            return self._child.hello.result(_START_S)
        except TimeoutError:
            raise EngineError(f"{WHO} was not ready after {_START_S:g} s: the machine is too busy") from None

    def describe(self) -> str:
        """Where it works, in a sentence for the log."""
        threads = self.ready().threads
        return f"{WHO} works in process {self.pid} with {threads} thread{'s' * (threads > 1)}"

    async def ask(self, what: str, args: tuple[Any, ...], about: str) -> Any:
        """The answer to a request that is the work of an engine; what is asked at once goes out together."""
        if not self._open:
            self._idle = asyncio.Event()
        self._open += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name=WHO)
        try:
            return await self._child.ask(what, args, about)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def call(self, what: str, args: tuple[Any, ...], about: str) -> Any:
        """The answer to a request between steps; blocks, so coroutines must not call it."""
        return self._result(self._child.send(what, args, about), about)

    def close(self) -> None:
        """End the process; requests under way fail."""
        if not self._is_closed:
            self._is_closed = True
            end_processes([self._child])

    def _result(self, future: Future[Any], about: str) -> Any:
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            self._child.kill(f"{about} took more than {self._deadline_s:g} s")
            raise EngineError(f"{WHO} did not answer for {about} within {self._deadline_s:g} s") from None

    async def _watch(self) -> None:
        """While requests are under way: a process that is silent, or whose step never ends, is killed."""
        while self._open:
            try:
                future = self._child.send("alive", (), "a sign of life")
                async with asyncio.timeout(self._alive_s):
                    step_s = await asyncio.wrap_future(future)
            except TimeoutError:
                self._child.kill(f"it did not answer for {self._alive_s:g} s")
                return
            except EngineError:  # it is over: those who wait are told
                return
            if step_s > self._deadline_s:
                self._child.kill(f"a step of it has not ended for {step_s:.0f} s")
                return
            try:
                async with asyncio.timeout(min(_EVERY_S, self._alive_s)):
                    await self._idle.wait()
            except TimeoutError:
                continue


class ProcessEngine:
    """One of the process's engines; see `protocol.Engine`."""

    def __init__(self, process: EngineProcess, copy: int) -> None:
        self.process, self._copy = process, copy
        self.version = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one answer, the same bits as an engine in this process."""
        about = f"prompt {request.counter.prompt}/session {request.counter.session}"
        return await self.process.ask("generate", (self._copy, request), about)

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Logprobs of ids[start:], each given all before it; their hidden states too, if asked."""
        about = request.name or "a sequence to score"
        return await self.process.ask("score", (self._copy, request, options), about)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take these weights; this returns when the process has copied them."""
        with closing(SharedBlock()) as block:
            self._call("load", block.fill([*weights]), version)
        self.version = version

    def sleep(self) -> Memory:
        """Free the KV memory; says what was freed."""
        return self._call("sleep")

    def wake(self) -> None:
        """Be ready again, with the weights as they were."""
        self._call("wake")

    def memory(self) -> Memory:
        """Bytes held now."""
        return self._call("memory")

    def fingerprint(self) -> Tensor:
        """Logprobs of a fixed token sequence, to compare with the learner's."""
        return self._call("fingerprint")

    def close(self) -> None:
        """Ends with the process, which `EngineProcess.close` does."""

    def _call(self, what: str, *args: Any) -> Any:
        return self.process.call(what, (self._copy, *args), _ABOUT[what])


_ABOUT = {
    "load": "loading weights",
    "sleep": "going to sleep",
    "wake": "waking",
    "memory": "measuring its memory",
    "fingerprint": "its fingerprint",
}
