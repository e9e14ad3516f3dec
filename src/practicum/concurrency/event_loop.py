"""The process's one event loop, in its own thread. Everything asynchronous runs there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from practicum.errors import DeadlineError
from practicum.user_code import running_frames

T = TypeVar("T")
UNWIND_S = 5.0
"""Seconds that cancelled work may take to clean up."""
_ANSWER_S = 2.0
"""Seconds after which an event loop that answers nothing counts as blocked."""
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, started by the first call in a daemon thread."""
    global _loop, _thread
    with _lock:
        if _loop is None:
            # Not by the policy, which in Ray's workers is uvloop's: at the end of a pipe that loop leaves its
            # handle open, and when it is collected closes a number that may be another file's by then.
            _loop = asyncio.SelectorEventLoop()
            _thread = threading.Thread(target=_run, args=(_loop,), name="practicum-events", daemon=True)
            _thread.start()
        return _loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()  # ends if user code stops the loop, which is not its own
        except (KeyboardInterrupt, SystemExit):
            # A task of user code raised it. Whoever awaits that task gets it; the others continue.
            continue


def run_async(work: Coroutine[Any, Any, T], *, timeout: float, owner: str) -> T:
    """Run a coroutine from synchronous code, and cancel it at the deadline.

    When this returns or raises, the work is over, unless it refuses to end for UNWIND_S. A function that
    blocks the event loop is named in the DeadlineError. Of a group of errors, the first is raised.
    """
    scope = _SCOPE.get()
    _release_threads()
    running = _Running(work, event_loop(), owner)
    try:
        if scope is not None:
            scope.add(running)
        return running.future.result(timeout)
    except concurrent.futures.TimeoutError:
        if running.future.done():  # the work itself raised a TimeoutError
            raise
        blocked = blocked_by()
        running.cancel(0.0 if blocked else UNWIND_S)
        late = f"{owner} was not done after {timeout:g} s"
        raise DeadlineError(f"{late}: {blocked}" if blocked else late) from None
    except BaseException as error:
        running.cancel(UNWIND_S)  # Ctrl-C in the caller must not leave the work running
        while isinstance(error, BaseExceptionGroup):  # of a task group: the first failure is the one to show
            error = error.exceptions[0]
        raise error from error.__cause__
    finally:
        if scope is not None:
            scope.remove(running)


class WorkScope:
    """Threads that run asynchronous work inside of it (`with`) can be ended from outside by `cancel`."""

    def __init__(self) -> None:
        self._lock, self.is_cancelled = threading.Lock(), False
        self._running: set[_Running] = set()
        self._entered = threading.local()

    def __enter__(self) -> None:
        self._entered.token = _SCOPE.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        _SCOPE.reset(self._entered.token)

    def add(self, running: _Running) -> None:
        """Add work that begins. A cancelled scope starts none."""
        with self._lock:
            if self.is_cancelled:
                raise concurrent.futures.CancelledError
            self._running.add(running)

    def remove(self, running: _Running) -> None:
        with self._lock:
            self._running.discard(running)

    def cancel(self) -> None:
        """Cancel running work, and all work that is added later."""
        with self._lock:
            self.is_cancelled, running = True, list(self._running)
        for task in running:
            task.cancel(0.0)


_SCOPE: ContextVar[WorkScope | None] = ContextVar("scope", default=None)


class _Running:
    """A coroutine that another thread waits for. It is closed if it never starts."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, owner: str) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._work, self._loop, self._owner = work, loop, owner
        self._task: asyncio.Task[Any] | None = None
        loop.call_soon_threadsafe(self._begin)

    def cancel(self, wait_s: float) -> None:
        """End the work, and wait so long for its end."""
        if self.future.cancel():
            self._work.close()
            return
        if not self.future.done():
            self._loop.call_soon_threadsafe(self._cancel)
            concurrent.futures.wait([self.future], wait_s)

    def _begin(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self._task = self._loop.create_task(self._work, name=self._owner)
            self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        _release_threads()
        if task.cancelled():
            self.future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _release_threads() -> None:
    """Release the calling thread's helpers, if torch is loaded: another thread computes next."""
    if "torch" in sys.modules:
        from practicum.compat.torch import release_threads

        release_threads()


def blocked_by() -> str | None:
    """Return who blocks the event loop, with the lines of code, or None if it answers."""
    loop, answers = event_loop(), threading.Event()
    loop.call_soon_threadsafe(answers.set)
    if answers.wait(_ANSWER_S):
        return None
    task = asyncio.current_task(loop)
    name = "a task" if task is None else task.get_name()
    frames = "" if _thread is None or _thread.ident is None else running_frames(_thread.ident)
    advice = "  → await what takes long, or move it into a thread: await asyncio.to_thread(function, …)"
    return "\n".join(filter(None, [f"{name} blocks the event loop", frames, advice]))
