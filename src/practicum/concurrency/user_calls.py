"""Calling reward functions: sync or async, one sample or a batch, never longer than their time.

An outcome is either a value or a message. A user's function can't raise through this module or block it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from practicum.user_code import error_line

_ASYNC_AT_ONCE = 64
_CLEANUP_S = 1.0


@dataclass(frozen=True, slots=True)
class CallResult:
    """A value, or a failure in words with the exception behind it."""

    value: Any = None
    failure: str | None = None
    error: BaseException | None = None


def raised(error: BaseException) -> CallResult:
    return CallResult(failure=f"raised {error_line(error)}", error=error)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if calling the function (or callable object) returns something to await."""
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def call_each(
    function: Callable[[Any], Any],
    arguments: Sequence[Any],
    timeout: float,
    stop_early: bool,
    named: Callable[[Any], str],
) -> list[CallResult]:
    """Call once per argument: an async function concurrently, a sync one in turn, each call in a thread.

    With `stop_early` a sync function is not called again after a failure: the rest has no outcome. `named`
    describes a call, should it block the event loop.
    """
    if is_async(function):
        gate = asyncio.Semaphore(_ASYNC_AT_ONCE)

        async def call(argument: Any) -> CallResult:
            async with gate:
                return await _await(lambda: function(argument), timeout, named(argument))

        return list(await asyncio.gather(*map(call, arguments)))
    outcomes: list[CallResult] = []
    for argument in arguments:
        outcome = await _call_in_thread(function, argument, timeout)
        if inspect.isawaitable(outcome.value):
            # A plain function around an async one, as a lambda or a decorator makes it.
            outcome = await _await(lambda value=outcome.value: value, timeout, named(argument))
        outcomes.append(outcome)
        if stop_early and outcome.failure is not None:
            break
    return outcomes


async def _await(call: Callable[[], Awaitable[Any]], timeout: float, name: str) -> CallResult:
    """Await one call of an async function. Abandon a function that swallows its cancellation."""

    async def body() -> Any:
        return await call()

    task = asyncio.create_task(body(), name=name)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP_S)
            return CallResult(failure=f"did not answer within {timeout:g} s")
    finally:
        task.cancel()
    if task.cancelled():
        return CallResult(failure="cancelled itself")
    if (error := task.exception()) is not None:
        return raised(error)
    return CallResult(task.result())


async def _call_in_thread(function: Callable[[Any], Any], argument: Any, timeout: float) -> CallResult:
    """Call in a daemon thread: a function that never returns does not keep the process alive."""
    loop, arrival = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def work() -> None:
        try:
            outcome = CallResult(function(argument))
        except BaseException as error:  # SystemExit too: the waiting side must hear of it
            outcome = raised(error)
        with suppress(RuntimeError):  # the loop was closed while the function ran: nobody waits any more
            loop.call_soon_threadsafe(lambda: arrival.done() or arrival.set_result(outcome))

    threading.Thread(target=work, name="practicum-reward", daemon=True).start()
    try:
        return await asyncio.wait_for(arrival, timeout)
    except TimeoutError:
        return CallResult(failure=f"did not answer within {timeout:g} s")
