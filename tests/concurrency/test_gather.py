"""Work side by side: the first failure ends all of it and is what surfaces."""

from __future__ import annotations

import asyncio

import pytest

from practicum.concurrency.gather import task_group


async def fail() -> None:
    raise ValueError("a task")


def test_a_task_that_fails_ends_the_block_at_once():
    ended = []

    async def work() -> None:
        async with task_group() as tasks:
            tasks.create_task(fail())
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("block")

    with pytest.raises(ValueError, match="a task"):
        asyncio.run(work())
    assert ended == ["block"]


def test_a_block_that_fails_ends_its_tasks():
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def work() -> None:
        async with task_group() as tasks:
            tasks.create_task(wait())
            await asyncio.sleep(0)
            raise KeyError("the block")

    with pytest.raises(KeyError, match="the block"):
        asyncio.run(work())
    assert ended == ["task"]
