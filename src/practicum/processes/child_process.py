"""The parent's side of one process: requests out, replies in, and what happens when it dies.

A thread writes and a thread reads, so the event loop never waits for the pipe. A process that died or had to
be killed is never used again: every later request is refused with what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any

from practicum.errors import PracticumError
from practicum.processes.child_main import CANCEL, HELLO, STOP, ChildReply, ChildRequest, receive, send

_EXIT_S = 2.0
"""How long a process may take to be gone after its end of the pipe closed."""

_STARTING = threading.Lock()


@dataclass(slots=True)
class _PendingRequest:
    future: Future[Any]
    about: str
    tokens: int


class ChildProcess:
    """One process, in which `main(pipe, setup)` runs and never returns. `who` begins its error messages."""

    def __init__(
        self,
        who: str,
        main: Callable[[Any, Any], object],
        setup: object,
        *,
        error: Callable[[str], PracticumError],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.hello: Future[Any] = Future()
        """What the process reports when it is loaded, or its own message why it is not."""
        self.busy_s = 0.0
        """Seconds of work, as of the last reply."""
        self._who, self._main, self._setup, self._raise = who, main, setup, error
        self._env = dict(env or {})
        self._lock, self._reaping = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(HELLO + 1)
        self._waiting: dict[int, _PendingRequest] = {HELLO: _PendingRequest(self.hello, "starting", 0)}
        self._arriving: list[ChildRequest] = []
        self._outbox: queue.SimpleQueue[list[ChildRequest] | None] = queue.SimpleQueue()
        self._over: str | None = None
        self._threads: list[threading.Thread] = []

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that are not answered yet."""
        with self._lock:
            return sum(waiting.tokens for waiting in self._waiting.values())

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Launch the process; does not wait for it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=self._main, args=(theirs, self._setup), name=self._who, daemon=True
        )
        with child_environment(self._env), _without_interrupts(), _without_script():
            self._process.start()
        theirs.close()  # only the child may hold it, so that its death closes the pipe
        for run in (self._read, self._write):
            self._threads.append(
                threading.Thread(target=run, name=f"{self._who} {run.__name__}", daemon=True)
            )
            self._threads[-1].start()

    def post(self, what: Any, args: Sequence[Any], about: str, tokens: int = 0) -> tuple[int, Future[Any]]:
        """Put a request into the next `flush`; its number (for `forget`) and its result to come."""
        future: Future[Any] = Future()
        with self._lock:
            if self._over is not None:
                raise self._error(about)
            number = next(self._numbers)
            self._waiting[number] = _PendingRequest(future, about, tokens)
            self._arriving.append(ChildRequest(number, what, tuple(args)))
        return number, future

    def send(self, what: Any, args: Sequence[Any], about: str) -> Future[Any]:
        """Send a request at once; its result to come."""
        _, future = self.post(what, args, about)
        self.flush()
        return future

    async def ask(self, what: Any, args: Sequence[Any], about: str, tokens: int = 0) -> Any:
        """The answer to a request; what is asked in one turn of the event loop goes out together."""
        number, future = self.post(what, args, about, tokens)
        asyncio.get_running_loop().call_soon(self.flush)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self.forget(number)

    def check(self, about: str) -> None:
        """An error with what happened if the process can't be used any more."""
        with self._lock:
            if self._over is not None:
                raise self._error(about)

    def flush(self) -> None:
        """Send what was posted, as one message: its rows are scored together."""
        with self._lock:
            requests, self._arriving = self._arriving, []
        if requests:
            self._outbox.put(requests)

    def forget(self, number: int) -> None:
        """Nobody waits for this request any more."""
        with self._lock:
            if self._waiting.pop(number, None) is None:
                return
            self._arriving.append(ChildRequest(number, CANCEL))
        self.flush()

    def kill(self, why: str) -> None:
        """End the process at once; requests under way fail with the reason."""
        self._fail(f"its process {self.pid} was killed: {why}")
        self._process.kill()

    def ask_to_stop(self, why: str) -> None:
        """Begin to close: no more requests, and the process may end by itself."""
        self._fail(why)
        self._outbox.put([ChildRequest(HELLO, STOP)])

    def gone(self, timeout: float) -> bool:
        """Wait until the process has ended; whether it has."""
        if not multiprocessing.connection.wait([self._process.sentinel], timeout):
            return False
        with self._reaping:  # two threads that wait for one child would race for its exit code
            self._process.join(_EXIT_S)
            return self._process.exitcode is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Send SIGTERM or SIGKILL to the process."""
        if number == signal.SIGKILL:
            self._process.kill()
        else:
            self._process.terminate()

    def release(self) -> None:
        """Release threads and pipe, after the process has ended."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_EXIT_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._pipe.close()

    def _write(self) -> None:
        # A broken pipe is handled by the reader, which sees the end of the process too.
        with suppress(OSError):
            while requests := self._outbox.get():
                send(self._pipe, requests)

    def _read(self) -> None:
        while True:
            try:
                replies: list[ChildReply] = receive(self._pipe)
            except (EOFError, OSError):
                break
            for reply in replies:
                self._settle(reply)
        if not self.gone(_EXIT_S):
            self._process.kill()
            self.gone(_EXIT_S)
        self._fail(f"its process {self.pid} ended ({_ending(self._process.exitcode)})")
        self._outbox.put(None)

    def _settle(self, reply: ChildReply) -> None:
        with self._lock:
            self.busy_s = max(self.busy_s, reply.busy_s)
            waiting = self._waiting.pop(reply.number, None)
        if waiting is None:
            return
        with suppress(InvalidStateError):  # cancelled in this very moment
            if reply.error is None:
                waiting.future.set_result(reply.result)
            else:
                waiting.future.set_exception(
                    self._raise(f"{self._who} failed in {waiting.about}: {reply.error}")
                )

    def _fail(self, why: str) -> None:
        """Refuse everything from now on; the first reason stays."""
        with self._lock:
            self._over = self._over or why
            waiting, self._waiting = list(self._waiting.values()), {}
            self._arriving.clear()
            errors = [self._error(request.about) for request in waiting]
        for request, error in zip(waiting, errors, strict=True):
            with suppress(InvalidStateError):
                request.future.set_exception(error)

    def _error(self, about: str) -> PracticumError:
        return self._raise(f"{self._who} can't continue with {about}: {self._over}")


def end_processes(
    children: Sequence[ChildProcess], seconds: tuple[float, float, float] = (2.0, 1.0, 1.0)
) -> None:
    """End processes: ask them, then SIGTERM, then SIGKILL, with this many seconds for each step."""
    for child in children:
        child.ask_to_stop("it was closed")
    left = _still_running(children, seconds[0])
    for number, grace in zip((signal.SIGTERM, signal.SIGKILL), seconds[1:], strict=True):
        for child in left:
            child.send_signal(number)
        left = _still_running(left, grace)
    for child in children:
        child.release()


def _still_running(children: Sequence[ChildProcess], seconds: float) -> list[ChildProcess]:
    until = time.monotonic() + seconds
    return [child for child in children if not child.gone(max(0.0, until - time.monotonic()))]


@contextmanager
def child_environment(more: Mapping[str, str]) -> Iterator[None]:
    """Adds variables to this process's environment for processes that are started in the block.

    They see them from their first import on. One thread at a time: others wait.
    """
    with _STARTING:
        before = {name: os.environ.get(name) for name in more}
        os.environ.update(more)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started in the block does not hear Ctrl-C, from its first import until it serves."""
    resource_tracker.ensure_running()  # starting it lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}; its own messages are above"
    names = {s.value: s.name for s in signal.Signals}
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"by signal {names.get(-code, -code)}{hint}"


@contextmanager
def _without_script() -> Iterator[None]:
    """A process that is started in the block does not run the program's own script again.

    It needs nothing of it, and a script without `if __name__ == "__main__"` would train in each child.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
