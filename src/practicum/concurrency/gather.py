"""Work side by side, where the first failure ends all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks beside the block: the first that fails ends all, and its own error surfaces, not a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        error = failed.exceptions[0]
        raise error from error.__cause__


async def gather_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. One that fails cancels the others, and its own error surfaces, not a group."""
    now = asyncio.current_task()
    assert now is not None
    async with task_group() as group:  # tasks have the name of whose work they are: errors say it
        tasks = [group.create_task(work, name=now.get_name()) for work in works]
    return [task.result() for task in tasks]


@asynccontextmanager
async def in_thread(context: AbstractContextManager[None]) -> AsyncIterator[None]:
    """Enter and leave a context whose ends block, without blocking the event loop."""
    entering = asyncio.ensure_future(asyncio.to_thread(context.__enter__))

    def leave(entered: asyncio.Future[None]) -> None:
        if not entered.cancelled() and entered.exception() is None:
            entered.get_loop().run_in_executor(None, context.__exit__, None, None, None)

    try:
        await asyncio.shield(entering)
    except asyncio.CancelledError:  # the thread still enters: somebody must leave
        entering.add_done_callback(leave)
        raise
    try:
        yield
    except BaseException as error:
        await asyncio.to_thread(context.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(context.__exit__, None, None, None)
