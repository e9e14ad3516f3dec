"""The processes of one model: started side by side, asked by load, and ended within bounds."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from practicum.errors import TeacherError
from practicum.places import model_worker as worker
from practicum.places.model_worker import LoadedModelFacts, RewardModelSetup, TeacherSetup
from practicum.processes.child_process import ChildProcess

_GRACE_S = 2.0
"""How long a process may take to end when asked, and again when terminated; then it is killed."""


class ReplicaProcesses:
    """Replicas of a model, each a process; `who` and `path` (its key in the recipe) are for errors.

    `start`, then `ready`, then ask; the methods that are no coroutines block and must not be called by
    coroutines.
    """

    def __init__(
        self, who: str, path: str, setup: TeacherSetup | RewardModelSetup, *, replicas: int, deadline_s: float
    ) -> None:
        self.who, self.path = who, path
        self._deadline_s = deadline_s
        self._replicas = [ChildProcess(who, worker.main, setup, error=TeacherError) for _ in range(replicas)]
        self._facts: LoadedModelFacts | None = None
        self._started = self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds of scoring so far, summed over the processes."""
        return sum(replica.busy_s for replica in self._replicas)

    @property
    def pids(self) -> list[int]:
        """The processes' ids, once started."""
        return [replica.pid for replica in self._replicas]

    def start(self) -> None:
        """Launch the processes; they load side by side while the caller goes on."""
        self._started = True
        for replica in self._replicas:
            replica.start()

    def ready(self, timeout: float) -> LoadedModelFacts:
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

    def facts(self) -> LoadedModelFacts:
        """What the model is like; known once `ready`."""
        if self._facts is None:
            raise TeacherError(f"{self.who} is not ready: call start() and ready() first")
        return self._facts

    def check(self, about: str) -> None:
        """A TeacherError with what happened if one of the processes can't be used any more."""
        for replica in self._replicas:
            replica.check(about)

    async def ask(self, what: str, args: Sequence[Any], about: str, tokens: int) -> Any:
        """The answer of the process with the fewest tokens waiting.

        A process that gave none until the deadline is killed.
        """
        self.check(about)
        replica = min(self._replicas, key=lambda r: r.waiting_tokens)
        number, future = replica.post(what, args, about, tokens)
        # What is handed in during one turn of the event loop goes out together.
        asyncio.get_running_loop().call_soon(replica.flush)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            self._break(f"it did not answer for {about} within {self._deadline_s:g} s", [replica])
            raise TeacherError(
                f"{self.who} did not answer for {about} within {self._deadline_s:g} s; its "
                f"process {replica.pid} was killed. If it is only slow, raise {self.path}.deadline_s"
            ) from None
        finally:
            replica.forget(number)

    def close(self) -> None:
        """End the processes: ask, then terminate, then kill; within 5 s. Rows under way fail."""
        if self._closed or not self._started:
            return
        self._closed = True
        for replica in self._replicas:
            replica.ask_to_stop("it was closed")
        left = self._still_there(self._replicas, _GRACE_S)
        for how, grace in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
            for replica in left:
                replica.end(how)
            left = self._still_there(left, grace)
        for replica in self._replicas:
            replica.release()

    def _still_there(self, replicas: list[ChildProcess], grace: float) -> list[ChildProcess]:
        until = time.monotonic() + grace
        return [r for r in replicas if not r.gone(max(0.0, until - time.monotonic()))]

    def _break(self, why: str, replicas: list[ChildProcess]) -> None:
        for replica in replicas:
            replica.kill(why)

    def _wait(self, futures: list[Future[Any]]) -> list[Any]:
        for replica in self._replicas:
            replica.flush()
        until = time.monotonic() + self._deadline_s
        try:
            return [future.result(max(0.0, until - time.monotonic())) for future in futures]
        except TimeoutError:
            why = f"it did not answer within {self._deadline_s:g} s"
            late = [r for r, f in zip(self._replicas, futures, strict=False) if not f.done()]
            self._break(why, late)
            raise TeacherError(f"{self.who}: {why} and was killed") from None
