"""The processes of one frozen model: started side by side, asked by load, and ended within bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from practicum.errors import TeacherError
from practicum.processes.child_main import Served, serve
from practicum.processes.child_process import ChildProcess, end_processes
from practicum.recipe.schema.teacher_sections import Own


class ModelFacts(NamedTuple):
    """What a process says of itself when its model is loaded."""

    context: int | None
    """Longest sequence; None if neither recipe nor model declares one."""
    threads: int


Loader = Callable[[], tuple[Served, int | None]]
"""Loads the model in its process: gives what answers requests, and its longest sequence.

A module-level function, or a `functools.partial` of one.
"""


def _main(pipe: Connection, setup: tuple[Loader, int]) -> None:
    serve(pipe, lambda: _load(*setup))


def _load(load: Loader, threads: int) -> tuple[Served, ModelFacts]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()  # bars of several processes would draw over each other
    served, context = load()
    return served, ModelFacts(context, torch.get_num_threads())


class ModelProcesses:
    """Replicas of a model, each a process; `who` and `path` (its key in the recipe) are for errors.

    `start`, then `ready`, then ask. Methods that are not coroutines block: coroutines must not call them.
    """

    def __init__(self, who: str, path: str, load: Loader, options: Own, *, deadline_s: float) -> None:
        self.who, self.path = who, path
        self._deadline_s = deadline_s
        setup = load, options.threads
        # In the environment from the start: torch reads the number of threads when it is imported.
        env = {"OMP_NUM_THREADS": str(options.threads)}
        self._replicas = [
            ChildProcess(who, _main, setup, error=TeacherError, env=env) for _ in range(options.replicas)
        ]
        self._facts: ModelFacts | None = None
        self._started = self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds of work so far, summed over the processes."""
        return sum(replica.busy_s for replica in self._replicas)

    @property
    def pids(self) -> list[int]:
        """The processes' ids, once started."""
        return [replica.pid for replica in self._replicas]

    def start(self) -> None:
        """Launch the processes; they load side by side while the caller continues."""
        self._started = True
        for replica in self._replicas:
            replica.start()

    def ready(self, timeout: float) -> ModelFacts:
        """Wait until every process has its model. If one fails or is late, all are ended."""
        until = time.monotonic() + timeout
        try:
            for replica in self._replicas:
                self._facts = replica.hello.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            self.close()
            raise TeacherError(
                f"{self.who} was not ready after {timeout:g} s: a large model needs more time "
                "(placement.own.start_s), or the machine is too busy"
            ) from None
        except TeacherError:
            self.close()
            raise
        return self.facts()

    def facts(self) -> ModelFacts:
        """What the model is like; known once `ready`."""
        if self._facts is None:
            raise TeacherError(f"{self.who} is not ready: call start() and ready() first")
        return self._facts

    async def ask(self, what: str, args: Sequence[Any], about: str, tokens: int) -> Any:
        """The answer of the process with the fewest tokens waiting.

        A process that has not answered at the deadline is killed. If one has died, all requests fail.
        """
        for replica in self._replicas:
            replica.check(about)
        replica = min(self._replicas, key=lambda r: r.waiting_tokens)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await replica.ask(what, args, about, tokens)
        except TimeoutError:
            replica.kill(f"it did not answer for {about} within {self._deadline_s:g} s")
            raise TeacherError(
                f"{self.who} did not answer for {about} within {self._deadline_s:g} s; its "
                f"process {replica.pid} was killed. If it is only slow, raise {self.path}.deadline_s"
            ) from None

    def ask_all(self, what: str, args: Sequence[Any], about: str) -> list[Any]:
        """The answers of all processes. If one has none at the deadline or fails, all are killed."""
        for replica in self._replicas:
            if replica.waiting_tokens:
                raise TeacherError(f"{self.who} can't begin {about} while rows are under way")
        try:
            return self._wait([replica.post(what, args, about)[1] for replica in self._replicas])
        except TeacherError as error:
            for replica in self._replicas:
                replica.kill(str(error))
            raise

    def ask_first(self, what: str, about: str) -> Any:
        """The answer of the first process."""
        return self._wait([self._replicas[0].post(what, (), about)[1]])[0]

    def close(self) -> None:
        """End the processes within 5 s. Requests under way fail."""
        if self._closed or not self._started:
            return
        self._closed = True
        end_processes(self._replicas)

    def _wait(self, futures: list[Future[Any]]) -> list[Any]:
        for replica in self._replicas:
            replica.flush()
        until = time.monotonic() + self._deadline_s
        try:
            return [future.result(max(0.0, until - time.monotonic())) for future in futures]
        except TimeoutError:
            why = f"it did not answer within {self._deadline_s:g} s"
            for replica, future in zip(self._replicas, futures, strict=False):
                if not future.done():
                    replica.kill(why)
            raise TeacherError(f"{self.who}: {why} and was killed") from None
