"""The process's one event loop, in its own thread; everything asynchronous runs there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from practicum.errors import DeadlineError

T = TypeVar("T")
UNWIND_S = 5.0
"""Seconds that cancelled work may take to clean up."""
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, started at the first call; its daemon thread ends with the process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(_loop,), name="practicum-events", daemon=True).start()
        return _loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A task of user code raised it. Whoever awaits that task gets it; the others continue.
            continue


def run_async(work: Coroutine[Any, Any, T], *, timeout: float, owner: str) -> T:
    """Run a coroutine to its end from synchronous code; past the deadline it is cancelled.

    When this returns or raises, the work is over, unless it refuses to end for UNWIND_S.
    """
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(watched(), event_loop())
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        if future.done():  # the work itself raised a TimeoutError
            raise
        future.cancel()
        ended.wait(UNWIND_S)
        raise DeadlineError(f"{owner} was not done after {timeout:g} s") from None
    except BaseException:
        future.cancel()  # Ctrl-C in the caller must not leave the work running
        ended.wait(UNWIND_S)
        raise
