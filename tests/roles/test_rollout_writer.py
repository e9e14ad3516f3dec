"""The puts of rows of finished sessions."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import pytest

from practicum.dataplane.keys import Key, Tags
from practicum.errors import StoreError
from practicum.roles.rollout import SessionRow, SessionRunner
from practicum.runtime.ray.rollout_worker import RowWriter


class Slow:
    """Sessions whose first put waits until it may go on."""

    def __init__(self) -> None:
        self.go, self.puts = threading.Event(), list[list[int]]()

    def put(self, partition: str, rows: list[SessionRow], stage: str) -> None:
        assert self.go.wait(10)
        if partition == "broken":
            raise StoreError("no room")
        self.puts.append([row.key.prompt for row in rows])


def test_rows_that_come_during_a_put_share_the_next_one():
    async def run() -> None:
        writer = RowWriter()

        def put(prompt: int, partition: str = "train") -> asyncio.Task[None]:
            row = SessionRow(Key(prompt), Tags(), None)
            return asyncio.ensure_future(writer.put(cast(SessionRunner, slow), partition, [row]))

        first = put(0)
        await asyncio.sleep(0.01)
        later = [put(prompt) for prompt in range(1, 4)]
        broken = put(4, "broken")
        await asyncio.sleep(0.01)
        assert not first.done()
        slow.go.set()
        await asyncio.gather(first, *later)
        with pytest.raises(StoreError):
            await broken

    slow = Slow()
    asyncio.run(run())
    assert slow.puts == [[0], [1, 2, 3]]
