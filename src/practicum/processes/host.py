"""A model in a separate process: start it, call its methods with deadlines, and report why it ended.

`serve` is the child's side. Separate threads read and write, so the event loop never waits for the pipe.
After a process dies or is killed, every later call fails with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar, TypeVarTuple

from practicum.errors import EngineError
from practicum.processes.serve import ALIVE, CANCEL, HELLO, STOP, Call, Loader, Reply, receive, send

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
START_S = 1800.0
"""Deadline in seconds for loading the model. A dead process is noticed immediately."""
_EXIT_S = 2.0
"""Deadline in seconds for ending after the pipe closes or a stop request."""
_ALIVE_S, _EVERY_S = 60.0, 5.0
"""Seconds for a working process to reply to a ping, and the pause between pings."""
_HOSTS: weakref.WeakSet[Host] = weakref.WeakSet()


class Host:
    """A process that serves the objects that `load` returns in it. `who` begins its error messages.

    A call, ping, or engine step that exceeds `deadline_s` ends the process. `late` is the advice for a start
    that exceeds `start_s`.
    """

    def __init__(
        self,
        who: str,
        load: Loader,
        *,
        threads: int,
        deadline_s: float,
        start_s: float = START_S,
        late: str = "the machine is too busy, or the model too large for it",
    ) -> None:
        self.who, self.threads = who, threads
        self._deadline_s, self._start_s, self._late = deadline_s, start_s, late
        self._lock = threading.Lock()
        self._numbers = itertools.count(HELLO + 1)
        self._hello: Future[Any] = Future()
        self._waiting: dict[int, Future[Any]] = {HELLO: self._hello}
        self._arriving: list[Call] = []
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over: str | None = None
        self._open, self._watching, self._is_closed = 0, None, False
        self._start(load)
        _HOSTS.add(self)

    def _start(self, load: Loader) -> None:
        ours, theirs = socket.socketpair()
        script = (
            f"import sys; sys.path = {sys.path!r}; "
            f"from practicum.processes.serve import main; main({theirs.fileno()})"
        )
        # Not multiprocessing, which reruns the user's script. A new session does not receive Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, self.who],
            env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()  # only the child holds it, so that its death closes the pipe
        self._pipe = Connection(ours.detach())
        self._outbox.put((load, self.threads))
        self._threads = [
            threading.Thread(target=run, name=f"{self.who} {run.__name__}", daemon=True)
            for run in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Wait until the objects are loaded. On failure, end the process."""
        try:
            self._hello.result(self._start_s)
        except TimeoutError:
            self.close()
            raise EngineError(f"{self.who} was not ready after {self._start_s:g} s: {self._late}") from None
        except BaseException:
            self.close()
            raise

    async def ask(self, method: Callable[[Any, *Ts], Awaitable[T]], *args: *Ts, target: int = 0) -> T:
        """Call a method of an object. Calls in one iteration of the event loop are sent together."""
        number, future = self._post(method.__name__, args, target)
        asyncio.get_running_loop().call_soon(self._flush)
        self._open += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name=self.who)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._open -= 1
            self._forget(number)

    def call(self, method: Callable[[Any, *Ts], T], *args: *Ts, target: int = 0) -> T:
        """Call a method of an object, and block until it returns. Coroutines must not use this."""
        _, future = self._post(method.__name__, args, target)
        self._flush()
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            why = f"{method.__name__} did not return within {self._deadline_s:g} s"
            self.kill(why)
            raise EngineError(f"{self.who}: {why}") from None

    def kill(self, why: str) -> None:
        """Kill the process immediately. Open calls fail with the reason."""
        self._fail(f"its process {self.pid} was killed: {why}")
        self._process.kill()

    def close(self) -> None:
        """End the process within 5 s. Open calls fail."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail("it was closed")
        self._outbox.put([Call(HELLO, STOP)])
        if not self._gone(_EXIT_S):
            self._process.terminate()
            if not self._gone(1.0):
                self._process.kill()
                self._gone(1.0)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_EXIT_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._pipe.close()

    async def _watch(self) -> None:
        """While calls are open, kill a process that is unresponsive or whose step hangs."""
        alive_s = min(_ALIVE_S, self._deadline_s)
        while self._open:
            try:
                _, future = self._post(ALIVE, (), 0)
                self._flush()
                async with asyncio.timeout(alive_s):
                    step_s = await asyncio.wrap_future(future)
            except TimeoutError:
                return self.kill(f"it was unresponsive for {alive_s:g} s")
            except EngineError:  # the process has ended, and waiting calls receive the reason
                return None
            if step_s > self._deadline_s:
                return self.kill(f"a step has not ended for {step_s:.0f} s")
            await asyncio.sleep(min(_EVERY_S, alive_s))

    def _post(self, method: str, args: tuple[Any, ...], target: int) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            if self._over is not None:
                raise self._error()
            number = next(self._numbers)
            self._waiting[number] = future
            self._arriving.append(Call(number, method, args, target))
        return number, future

    def _flush(self) -> None:
        with self._lock:
            calls, self._arriving = self._arriving, []
        if calls:
            self._outbox.put(calls)

    def _forget(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is None:
                return
            self._arriving.append(Call(number, CANCEL))
        self._flush()

    def _write(self) -> None:
        with suppress(OSError):  # on a broken pipe, the reader also sees the end of the process
            while message := self._outbox.get():
                send(self._pipe, message)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._settle(receive(self._pipe))
        if not self._gone(_EXIT_S):
            self._process.kill()
            self._gone(_EXIT_S)
        self._fail(f"its process {self.pid} ended ({_ending(self._process.returncode)})")
        self._outbox.put(None)

    def _gone(self, timeout: float) -> bool:
        """Wait for the process to end. Return True if it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode is not None

    def _settle(self, replies: list[Reply]) -> None:
        for reply in replies:
            with self._lock:
                future = self._waiting.pop(reply.number, None)
            with suppress(InvalidStateError):  # cancelled concurrently
                if future is not None and reply.error is not None:
                    future.set_exception(reply.error)
                elif future is not None:
                    future.set_result(reply.result)

    def _fail(self, why: str) -> None:
        """Fail all later calls with this reason, unless an earlier one is set."""
        with self._lock:
            self._over = self._over or why
            waiting, self._waiting = list(self._waiting.values()), {}
            self._arriving.clear()
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(self._error())

    def _error(self) -> EngineError:
        return EngineError(f"{self.who} can't continue: {self._over}")


def running_hosts() -> dict[str, int]:
    """Return the process ids of this process's running hosts by name."""
    return {host.who: host.pid for host in _HOSTS if host._process.poll() is None}


def _ending(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}; its output is above"
    names = {s.value: s.name for s in signal.Signals}
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"by signal {names.get(-code, -code)}{hint}"
