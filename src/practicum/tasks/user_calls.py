"""Calling reward functions: sync or async, one sample or a batch, never longer than their time.

An outcome is either a value or a sentence; nothing a function does can raise through here or hang.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.user_code import error_line, unawaited, undo_dtype

_ASYNC_AT_ONCE = 64
_CLEANUP_S = 1.0


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call gave: a value, or a failure in words with the exception behind it."""

    value: Any = None
    failure: str | None = None
    error: BaseException | None = None


def raised(error: BaseException) -> CallResult:
    """The outcome of a call that raised."""
    return CallResult(failure=f"raised {error_line(error)}", error=error)


def _late(timeout: float) -> CallResult:
    return CallResult(failure=f"did not answer within {timeout:g} s")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function (or callable object) gives something to await."""
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def call_each(
    function: Callable[[Any], Any],
    arguments: Sequence[Any],
    timeout: float,
    stop_early: bool,
    named: Callable[[Any], str],
) -> list[CallResult]:
    """Call once per argument: an async function side by side, a sync one in turn in a thread.

    With `stop_early` a sync function is not called again after a failure: the rest has no outcome. `named`
    says in words what is called on an argument, should it block the event loop.
    """
    if is_async(function):
        gate = asyncio.Semaphore(_ASYNC_AT_ONCE)

        async def one(argument: Any) -> CallResult:
            async with gate:
                return await _await(function, argument, timeout, named(argument))

        return list(await asyncio.gather(*(one(argument) for argument in arguments)))
    outcomes: list[CallResult] = []
    while len(outcomes) < len(arguments):
        outcomes += await _call_in_thread(function, arguments[len(outcomes) :], timeout, stop_early, named)
        if stop_early and outcomes[-1].failure is not None:
            break
    return outcomes


async def _await(
    function: Callable[[Any], Awaitable[Any]], argument: Any, timeout: float, name: str
) -> CallResult:
    """One call of an async function; a function that swallows its cancellation is left behind."""

    async def body() -> Any:
        return await function(argument)

    task = asyncio.create_task(body(), name=name)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP_S)
            return _late(timeout)
    finally:
        task.cancel()
    if (changed := undo_dtype()) is not None:
        return CallResult(failure=changed)
    if task.cancelled():
        return CallResult(failure="cancelled itself")
    if (error := task.exception()) is not None:
        return raised(error)
    failure = unawaited(task.result())
    return CallResult(task.result()) if failure is None else CallResult(failure=failure)


async def _call_in_thread(
    function: Callable[[Any], Any],
    arguments: Sequence[Any],
    timeout: float,
    stop_early: bool,
    named: Callable[[Any], str],
) -> list[CallResult]:
    """Call in order in one thread, up to the first call that is late: its thread is given up.

    The thread is a daemon: a function that never returns does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    arrivals: asyncio.Queue[CallResult] = asyncio.Queue()
    given_up = threading.Event()

    def work() -> None:
        for argument in arguments:
            if given_up.is_set():
                return
            try:
                outcome = CallResult(function(argument))
            except BaseException as error:  # SystemExit too: the waiting side must hear of it
                outcome = raised(error)
            if (changed := undo_dtype()) is not None:
                outcome = CallResult(failure=changed)
            try:
                loop.call_soon_threadsafe(arrivals.put_nowait, outcome)
            except RuntimeError:  # the loop was closed while the function ran: nobody waits any more
                return

    threading.Thread(target=work, name="practicum-reward", daemon=True).start()
    outcomes: list[CallResult] = []
    try:
        while len(outcomes) < len(arguments):
            try:
                outcome = await asyncio.wait_for(arrivals.get(), timeout)
            except TimeoutError:
                outcomes.append(_late(timeout))
                break
            if _is_awaitable(outcome.value):
                # A plain function around an async one, as a lambda or a decorator makes it.
                name = named(arguments[len(outcomes)])
                outcome = await _await(_identity, outcome.value, timeout, name)
            outcomes.append(outcome)
            if stop_early and outcome.failure is not None:
                break
    finally:
        given_up.set()
    return outcomes


def _is_awaitable(value: Any) -> bool:
    try:
        return inspect.isawaitable(value)
    except BaseException:  # a value that lies about its class; what it is worth is asked later
        return False


async def _identity(value: Awaitable[Any]) -> Any:
    return await value
