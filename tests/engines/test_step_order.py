"""Engines of one process step so many at a time, and those whose work is oldest go first."""

from __future__ import annotations

import asyncio
import threading

from practicum.engines.torch.engine_thread import EngineThread, Job, Outcome, share_order

STEPS = 5


class Counting:
    """Work of some steps for each job, whose first step waits until it may begin."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.begun, self.may_begin = threading.Event(), threading.Event()
        self.thread = EngineThread(self.step, lambda: None, name)
        self._job: Job | None = None
        self._left = 0

    def step(self, arrived: list[Job]) -> tuple[list[Outcome], bool]:
        if arrived:
            self._job, self._left = arrived[0], STEPS
            self.begun.set()
            assert self.may_begin.wait(30)
        assert self._job is not None
        self.log.append(self.name)
        self._left -= 1
        return ([] if self._left else [(self._job, self.name)]), self._left > 0


async def run_both(first: Counting, second: Counting) -> None:
    """The first is in its first step when the second comes."""
    for one in (first, second):
        one.begun.clear()
    first.may_begin.clear()
    second.may_begin.set()
    begun = asyncio.ensure_future(first.thread.submit(Job()))
    await asyncio.to_thread(first.begun.wait, 30)
    after = asyncio.ensure_future(second.thread.submit(Job()))
    await asyncio.sleep(0.05)
    first.may_begin.set()
    assert await asyncio.wait_for(asyncio.gather(begun, after), 30) == [first.name, second.name]


def test_the_oldest_work_goes_first_until_it_begins_anew():
    log = list[str]()
    one, other = Counting("one", log), Counting("other", log)
    share_order([one.thread, other.thread])
    try:
        asyncio.run(run_both(one, other))
        assert log == ["one"] * STEPS + ["other"] * STEPS
        log.clear()
        asyncio.run(
            run_both(other, one)
        )  # the first step of the other is under way: then comes the older one
        assert log == ["other"] + ["one"] * STEPS + ["other"] * (STEPS - 1)
        log.clear()
        one.thread.order.mark_newest(one.thread)
        asyncio.run(run_both(other, one))
        assert log == ["other"] * STEPS + ["one"] * STEPS
    finally:
        for counting in (one, other):
            counting.thread.close()


def test_two_step_at_once_if_there_are_cores_for_two():
    log = list[str]()
    engines = [Counting(name, log) for name in ("one", "two", "three")]
    share_order([one.thread for one in engines], at_once=2)

    async def run_all() -> None:
        one, two, three = engines
        running = []
        for engine in (one, two):
            running.append(asyncio.ensure_future(engine.thread.submit(Job())))
            await asyncio.to_thread(engine.begun.wait, 30)
        three.may_begin.set()
        running.append(asyncio.ensure_future(three.thread.submit(Job())))
        await asyncio.sleep(0.05)
        assert log == []
        two.may_begin.set()
        assert await asyncio.wait_for(running[1], 30) == "two"
        assert await asyncio.wait_for(running[2], 30) == "three"
        one.may_begin.set()
        assert await asyncio.wait_for(running[0], 30) == "one"

    try:
        asyncio.run(run_all())
    finally:
        for engine in engines:
            engine.may_begin.set()
            engine.thread.close()
    assert log == [name for name in ("two", "three", "one") for _ in range(STEPS)]


def test_an_engine_that_waits_for_its_turn_can_be_closed():
    log = list[str]()
    one, other = Counting("one", log), Counting("other", log)
    share_order([one.thread, other.thread])

    async def close_the_other() -> None:
        begun = asyncio.ensure_future(one.thread.submit(Job()))
        await asyncio.to_thread(one.begun.wait, 30)
        waits = asyncio.ensure_future(other.thread.submit(Job()))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(asyncio.to_thread(other.thread.close), 10)
        one.may_begin.set()
        assert await asyncio.wait_for(begun, 30) == "one"
        (error,) = await asyncio.gather(waits, return_exceptions=True)
        assert "the other was closed with 1 requests in flight" in str(error)

    try:
        asyncio.run(close_the_other())
    finally:
        one.thread.close()
    assert log == ["one"] * STEPS
