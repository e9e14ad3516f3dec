"""Replicas: who gets the next work, and what becomes of works whose replica is killed."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster import local_ray
from tests.runtime.actors import Caller, Desk, start

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.errors import ClusterError, DeadlineError, StoreError
from practicum.runtime.ray.actor_calls import WorkerDied, ask_async
from practicum.runtime.ray.replica_pool import ReplicaPool


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return run_async(work, timeout=90, owner="test")


async def call(ref: Any) -> Any:
    return await ask_async(ref, timeout=60, owner="test", who="a desk")


async def desk(replica: int, generation: int) -> Any:
    actor = start(Desk, replica, generation)
    await call(actor.pid.remote())
    return actor


@contextmanager
def desks(
    replicas: int, max_deaths: int = 3, make: Callable[[int], Awaitable[Any]] | None = None
) -> Iterator[tuple[ReplicaPool, list[str]]]:
    starts, said = Counter[int](), list[str]()

    async def next_generation(replica: int) -> Any:
        starts[replica] += 1
        return await desk(replica, starts[replica] - 1)

    limits = {"max_deaths": max_deaths, "start_s": 60}
    pool = ReplicaPool("desk", make or next_generation, replicas, **limits, on_death=said.append)
    run(pool.start())
    try:
        yield pool, said
    finally:
        run(pool.close())


def working(number: int, seconds: float = 0.0) -> Callable[[Any], Awaitable[tuple[int, int, int]]]:
    async def work(actor: Any) -> tuple[int, int, int]:
        return await call(actor.work.remote(number, seconds))

    return work


async def dying(actor: Any) -> None:
    await call(actor.die.remote())


async def kill(actor: Any) -> None:
    os.kill(await call(actor.pid.remote()), signal.SIGKILL)


# Routing, with handles that nobody calls.


async def number_of(replica: int) -> int:
    return replica + 1


@given(works=st.lists(st.tuples(st.floats(0.01, 100), st.booleans()), max_size=30), count=st.integers(1, 5))
def test_works_go_to_the_least_loaded(works: list[tuple[float, bool]], count: int):
    async def one_after_the_other() -> None:
        pool = ReplicaPool("fake", number_of, count, max_deaths=0, start_s=60)
        await pool.start()
        go = asyncio.Event()
        staying: list[asyncio.Future[None]] = []
        for load, stays in works:
            before = pool.loads()

            async def work(replica: int, before: list[float] = before, stays: bool = stays) -> None:
                assert before[replica - 1] == min(before)
                if stays:
                    await go.wait()

            running = asyncio.ensure_future(pool.run(work, load=load))
            await asyncio.wait([running], timeout=None if not stays else 0)
            staying.append(running)
        go.set()
        await asyncio.gather(*staying)
        assert pool.loads() == [0.0] * count

    run(one_after_the_other())


def test_idle_replicas_take_turns():
    async def same(replica: int) -> int:
        return replica

    async def turns() -> list[int]:
        pool = ReplicaPool("fake", number_of, 3, max_deaths=0, start_s=60)
        await pool.start()
        return [await pool.run(same, load=1.0) for _ in range(6)]

    assert run(turns()) == [1, 2, 3, 1, 2, 3]


def test_a_group_stays_on_its_replica():
    async def groups() -> list[int]:
        pool = ReplicaPool("fake", number_of, 2, max_deaths=0, start_s=60)
        await pool.start()
        go = asyncio.Event()

        async def work(replica: int) -> int:
            await go.wait()
            return replica

        order = ["a", "b", "a", "a", "a", None, "b"]
        works = [asyncio.ensure_future(pool.run(work, load=1.0, sticky=group)) for group in order]
        await asyncio.sleep(0)
        assert pool.loads() == [4.0, 3.0]
        go.set()
        return await asyncio.gather(*works)

    assert run(groups()) == [1, 2, 1, 1, 1, 2, 2]


# Deaths, of real processes.


def test_nothing_is_lost_or_done_twice_when_replicas_are_killed_under_load(cluster: None):
    undone: Counter[int] = Counter()

    with desks(3) as (pool, said):
        victims = [pool.replicas()[0], pool.replicas()[2]]

        async def one(number: int) -> tuple[int, int, int]:
            async def work(actor: Any) -> tuple[int, int, int]:
                return await working(number, 600 if actor in victims else 0.01)(actor)

            async def again() -> None:
                undone[number] += 1

            return await pool.run(work, load=1.0, sticky=number // 4, again=again)

        async def works() -> list[tuple[int, int, int]]:
            running = asyncio.ensure_future(gather_all(one(number) for number in range(60)))
            for victim in victims:
                await kill(victim)
            return await running

        results = run(works())
        assert [number for number, _, _ in results] == list(range(60))
        assert pool.deaths == len(said) == 2
        assert pool.reruns == sum(undone.values()) >= 40
        assert len(undone) == 40
        assert {sentence[: len("desk 0")] for sentence in said} == {"desk 0", "desk 2"}, "told in any order"
        assert " died (death 1, 3 are allowed): The actor is dead" in said[0]
        assert pool.loads() == [0.0] * 3
        # The dead are back, in their next generation.
        again = run(pool.each(working(-1)))
        assert again == [(-1, 0, 1), (-1, 1, 0), (-1, 2, 1)]


def test_each_reaches_every_replica_also_those_that_die_under_it(cluster: None):
    with desks(2) as (pool, _):
        first = pool.replicas()[0]

        async def work(actor: Any) -> tuple[int, int, int]:
            if actor is first:
                await dying(actor)
            return await working(7)(actor)

        assert run(pool.each(work)) == [(7, 0, 1), (7, 1, 0)]
        assert (pool.deaths, pool.reruns) == (1, 0)


def test_after_too_many_deaths_the_reason_stops_all_works(cluster: None):
    with desks(1, max_deaths=1) as (pool, said):

        async def works() -> list[BaseException | None]:
            works = [pool.run(dying, load=1.0), pool.run(dying, load=1.0)]
            return await asyncio.gather(*works, return_exceptions=True)

        for error in run(works()):
            assert isinstance(error, ClusterError)
            assert "desk: 2 deaths of workers, more than runtime.max_deaths = 1; the last: a desk" in str(
                error
            )
        assert len(said) == 2
        with pytest.raises(ClusterError, match="2 deaths"):
            run(pool.run(working(1), load=1.0))


def test_an_error_is_not_a_death(cluster: None):
    with desks(1) as (pool, _):

        async def failing(actor: Any) -> None:
            await call(actor.fail.remote(StoreError("row 3 is missing")))

        async def sees_another_die(actor: Any) -> None:
            other = start(Caller)
            await kill(other)
            await call(other.pid.remote())

        with pytest.raises(StoreError, match="row 3"):
            run(pool.run(failing, load=1.0))
        with pytest.raises(WorkerDied):
            run(pool.run(sees_another_die, load=1.0))
        assert (pool.deaths, pool.reruns) == (0, 0)
        assert run(pool.run(working(1), load=1.0)) == (1, 0, 0)


def test_a_replica_that_can_not_come_back_ends_the_works_with_the_reason(cluster: None):
    starts = count()

    async def once(replica: int) -> Any:
        start = next(starts)
        if start == 1:
            raise WorkerDied("a desk", "its node is full")
        if start == 2:
            raise StoreError("the store is gone")
        return await desk(replica, start)

    with desks(1, make=once) as (pool, said):
        with pytest.raises(ClusterError, match="desk 0 could not be restarted: the store is gone"):
            run(pool.run(dying, load=1.0))
        assert pool.deaths == 2
        assert said[1].endswith("its node is full")


def test_a_replica_that_is_not_back_is_described_until_it_is(cluster: None):
    starts, may_start = count(), asyncio.Event()

    async def second_waits(replica: int) -> Any:
        if start := next(starts):
            await may_start.wait()
        return await desk(replica, start)

    with desks(1, make=second_waits) as (pool, _):
        assert pool.missing() == []

        async def wait() -> list[str]:
            work = asyncio.create_task(pool.run(dying, load=1.0))
            while not (described := pool.missing()):
                await asyncio.sleep(0.01)
            work.cancel()
            may_start.set()
            await pool.run(working(1), load=1.0)
            return described

        (line,) = run(wait())
        assert line.startswith("desk 0 died")
        assert pool.missing() == []


def test_a_late_start_passes_its_deadline_and_leaves_nothing():
    stopped: list[int] = []

    async def late(replica: int) -> Any:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.append(replica)

    pool = ReplicaPool("desk", late, 2, max_deaths=3, start_s=0.1)
    with pytest.raises(DeadlineError, match=r"desk \d was not ready after 0\.1 s"):
        run(pool.start())
    assert sorted(stopped) == [0, 1]


def test_works_end_when_the_pool_is_closed(cluster: None):
    with desks(2) as (pool, _):
        actors = pool.replicas()

        async def closing() -> list[Any]:
            works = [asyncio.ensure_future(pool.run(working(i, 600), load=1.0)) for i in range(3)]
            await asyncio.sleep(0)
            await pool.close()
            await pool.close()
            return await asyncio.gather(*works, return_exceptions=True)

        for error in run(closing()):
            assert isinstance(error, ClusterError)
            assert "stopped" in str(error)
        assert pool.deaths == 0
        for actor in actors:
            with pytest.raises(WorkerDied):
                run(call(actor.pid.remote()))
