"""The thread of an engine. Coroutines submit requests and await results, without polling.

Requests submitted in one iteration of the event loop reach the engine together, so that it starts with the
full batch. Results of an engine step are returned with one call per event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from practicum.compat.torch import release_threads
from practicum.errors import EngineError, PracticumError

TURN_S = 30.0
"""Seconds to wait for an engine step before giving up."""


@dataclass(eq=False, slots=True)
class Job:
    """Work that a coroutine awaits. The engine skips jobs whose coroutine was cancelled."""

    abandoned: bool = field(default=False, init=False)
    future: asyncio.Future[Any] | None = field(default=None, init=False)


Outcome = tuple[Job, Any]
"""A job and its result, or the exception it ended with."""


class _ClosedError(Exception):
    """The engine was closed while it waited for its turn."""


class StepOrder:
    """Order of the engines of a process, at most `at_once` of which step concurrently. Engines with the
    oldest weights go first, so that the learner's next batch is sampled first."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._ages: dict[EngineThread, int] = {}
        self._at_work: dict[EngineThread, int] = {}
        """Ages of the engines with work."""
        self._stepping = 0

    @contextlib.contextmanager
    def step(self, engine: EngineThread) -> Iterator[None]:
        """Wait for the engine's turn. It keeps its place until `rest`. A closed engine gets no turn."""
        with self._changed:
            if engine not in self._ages:
                self._ages[engine] = next(self._numbers)
            age = self._at_work[engine] = self._ages[engine]

            def is_next() -> bool:
                oldest = sorted(self._at_work.values())[: self._at_once]
                return self._stepping < self._at_once and age in oldest

            self._changed.wait_for(lambda: engine.closed or is_next())
            if engine.closed:
                raise _ClosedError
            self._stepping += 1
        try:
            yield
        finally:
            with self._changed:
                self._stepping -= 1
                self._changed.notify_all()

    def rest(self, engine: EngineThread) -> None:
        with self._changed:
            self._at_work.pop(engine, None)
            self._changed.notify_all()

    def mark_newest(self, engine: EngineThread) -> None:
        """Make the engine's work the newest."""
        with self._changed:
            self._ages.pop(engine, None)


def share_order(threads: Iterable[EngineThread], at_once: int = 1) -> None:
    """Share a step order: at most `at_once` engines step concurrently. Call this before they start."""
    order = StepOrder(at_once)
    for thread in threads:
        thread.order = order


class EngineThread:
    """Runs `step` in a thread while work remains. `reset` discards all work after a failure. `step` takes new
    jobs and returns outcomes, and True if work remains."""

    def __init__(
        self, step: Callable[[list[Job]], tuple[list[Outcome], bool]], reset: Callable[[], None], name: str
    ) -> None:
        self.turn = threading.Lock()
        """Held while a step runs. Acquire it to change state that steps use."""
        self.order = StepOrder()
        """Engines of one process may share it."""
        self._step, self._reset, self._name = step, reset, name
        self._began: float | None = None
        self._door = threading.Condition()
        self._arriving: dict[asyncio.AbstractEventLoop, list[Job]] = {}
        self._arrived: list[Job] = []
        self._open: set[Job] = set()
        self._thread: threading.Thread | None = None
        self._work_left = self._look_again = self._closed = False

    @contextlib.contextmanager
    def take_turn(self, what: str, timeout: float = TURN_S) -> Iterator[None]:
        """Wait for the current step, and block the next one. Raise EngineError if the step hangs."""
        if not self.turn.acquire(timeout=timeout):
            raise EngineError(f"the {self._name} can't {what}: a step has not ended for {timeout:g} s")
        try:
            yield
        finally:
            self.turn.release()

    @property
    def open_jobs(self) -> int:
        with self._door:
            return len(self._open)

    @property
    def step_s(self) -> float:
        """Seconds since the current step began, or 0 if none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def closed(self) -> bool:
        return self._closed

    async def submit(self, job: Job) -> Any:
        loop = asyncio.get_running_loop()
        job.future = loop.create_future()
        with self._door:
            if self._closed:
                raise EngineError(f"the {self._name} is closed")
            self._open.add(job)
            if loop not in self._arriving:
                self._arriving[loop] = []
                loop.call_soon(self._let_in, loop)
            self._arriving[loop].append(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._door:
                job.abandoned = self._look_again = True
                self._open.discard(job)
                self._door.notify()
            raise

    def close(self) -> None:
        """Stop the thread after the current step. Open jobs fail."""
        with self._door:
            self._closed = True
            thread = self._thread
            self._door.notify()
        self.order.rest(self)
        if thread is None:
            self._fail_all("was closed", None)
        elif thread is not threading.current_thread():
            thread.join(TURN_S)  # a hanging step blocks only its daemon thread

    def _let_in(self, loop: asyncio.AbstractEventLoop) -> None:
        release_threads()
        with self._door:
            self._arrived += self._arriving.pop(loop)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._door.notify()

    def _run(self) -> None:
        while True:
            with self._door:
                self._door.wait_for(
                    lambda: self._work_left or self._arrived or self._look_again or self._closed
                )
                if self._closed:
                    break
                arrived, self._arrived, self._look_again = self._arrived, [], False
            try:
                with self.order.step(self), self.turn:
                    self._began = time.monotonic()
                    outcomes, self._work_left = self._step(arrived)
            except _ClosedError:
                break
            except Exception as error:
                with self.turn:
                    self._reset()
                self._work_left = False
                self._fail_all("failed", error)
            else:
                self._deliver(outcomes)
            finally:
                self._began = None
                if not self._work_left:
                    release_threads()
                    self.order.rest(self)
        self.order.rest(self)
        self._fail_all("was closed", None)

    def _fail_all(self, what: str, cause: Exception | None) -> None:
        with self._door:
            jobs = list(self._open)
            self._arrived.clear()
        reason = f": {cause if isinstance(cause, PracticumError) else repr(cause)}" if cause else ""
        outcomes: list[Outcome] = []
        for job in jobs:
            job.abandoned = True
            error = EngineError(f"the {self._name} {what} with {len(jobs)} requests in flight{reason}")
            error.__cause__ = cause
            outcomes.append((job, error))
        self._deliver(outcomes)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
        with self._door:
            for job, result in outcomes:
                if job in self._open:
                    self._open.remove(job)
                    assert job.future is not None
                    by_loop.setdefault(job.future.get_loop(), []).append((job, result))
        for loop, settled in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the event loop may be closed
                loop.call_soon_threadsafe(_settle, settled)


def _settle(outcomes: list[Outcome]) -> None:
    for job, result in outcomes:
        assert job.future is not None
        if job.future.done():
            continue
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
