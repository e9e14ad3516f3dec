"""Replicas of one role. Work goes to the least loaded replica, and dead replicas are restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from practicum.compat.ray import actor_id
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.errors import ClusterError, DeadlineError
from practicum.processes.dispatch import Dispatcher, Slot
from practicum.runtime.ray.actor_calls import WorkerDied, ask_async

P = ParamSpec("P")
T = TypeVar("T")
_REMEMBERED = 16_384
"""Sticky keys that are kept before all are forgotten."""


@dataclass(slots=True, eq=False)
class _Place:
    """One replica: its current actor, or None while it restarts."""

    number: int
    actor: Any = None
    restart: asyncio.Task[None] | None = None
    death: str = ""
    """Why the last one died."""


class ReplicaPool:
    """Workers of one role, for the coroutines of one event loop.

    `make(replica)` starts a worker, waits until it can take work (with current weights) and returns its
    handle. If it fails it leaves no actor running. A death is a WorkerDied whose `actor` is the
    replica's own. After more than max_deaths of them every work ends with a ClusterError. `start_s` is the
    time for a start, and for the wait of a work for a live replica.
    """

    def __init__(
        self,
        role: str,
        make: Callable[[int], Awaitable[Any]],
        count: int,
        *,
        max_deaths: int,
        start_s: float,
        on_death: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.role, self.count, self.deaths, self.reruns = role, count, 0, 0
        self._make, self._max_deaths, self._start_s, self._on_death = make, max_deaths, start_s, on_death
        self._places = [_Place(number) for number in range(count)]
        self._dispatcher = Dispatcher(self._places)
        self._sticky: dict[Hashable, Any] = {}  # key → the actor it went to
        self._stopped: ClusterError | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start all replicas concurrently. If one can't, the others are stopped and its error is raised."""
        try:
            await gather_all(self._started(place) for place in self._places)
        except BaseException:
            await self.close()
            raise

    async def run(
        self,
        work: Callable[[Any], Awaitable[T]],
        *,
        load: float,
        sticky: Hashable | None = None,
        again: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Run work on the least loaded replica, or on the replica that ran earlier work with the `sticky`
        key.

        If the replica dies, `again` is awaited (to clean up partial work) and the work runs once more on a
        live replica. Other errors are raised unchanged.
        """
        while True:
            slot = await self._free_slot(sticky)
            with slot.busy(load) as place:
                actor = place.actor
                try:
                    return await work(actor)
                except WorkerDied as died:
                    self._note_death(place, actor, died)
            if again is not None:
                await again()
            self.reruns += 1

    async def each(self, work: Callable[[Any], Awaitable[T]]) -> list[T]:
        """Run idempotent work, such as loading weights, on every replica concurrently. Waits for replicas
        that are starting, and repeats the work on replicas that die."""

        async def on_place(place: _Place) -> T:
            while True:
                await self._until(lambda: place.actor is not None)
                actor = place.actor
                try:
                    return await work(actor)
                except WorkerDied as died:
                    self._note_death(place, actor, died)

        return await gather_all(on_place(place) for place in self._places)

    def calling(
        self, timeout: float, method: Callable[Concatenate[Any, P], Any], *args: P.args, **options: P.kwargs
    ) -> Callable[[Any], Awaitable[Any]]:
        """Return the work that calls a method of the replica's class, with a deadline."""

        async def work(worker: Any) -> Any:
            call = getattr(worker, method.__name__).remote(*args, **options)
            who = self.name_of(worker)
            return await ask_async(call, timeout=timeout, owner="the controller", who=who)

        return work

    def call_each(
        self, timeout: float, method: Callable[Concatenate[Any, P], Any], *args: P.args, **options: P.kwargs
    ) -> list[Any]:
        """Call a method on every replica from synchronous code, and return the results in order."""
        work = self.each(self.calling(timeout, method, *args, **options))
        return run_async(work, timeout=timeout + 5, owner=f"{method.__name__} on every {self.role} worker")

    def loads(self) -> list[float]:
        return [slot.load for slot in self._dispatcher.slots]

    def missing(self) -> list[str]:
        """Describe the replicas that died and are not back."""
        return [
            f"{self.role} {place.number} died and is still restarting: {place.death}"
            for place in self._places
            if place.actor is None and place.death
        ]

    def replicas(self) -> list[Any]:
        return [place.actor for place in self._places if place.actor is not None]

    def name_of(self, actor: Any) -> str:
        numbers = [place.number for place in self._places if place.actor is actor]
        return f"{self.role} {numbers[0]}" if numbers else f"a {self.role} worker"

    async def close(self) -> None:
        """End all replicas. Work in flight and later work raise ClusterError."""
        self._stop(ClusterError(f"{self.role}: its workers are stopped"))
        restarts = [place.restart for place in self._places if place.restart is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        for place in self._places:
            if place.actor is not None:
                ray.kill(place.actor)
                place.actor = None

    async def _free_slot(self, sticky: Hashable | None) -> Slot[_Place]:
        await self._until(lambda: any(place.actor is not None for place in self._places))
        slot = self._dispatcher.least_loaded(lambda place: place.actor is not None)
        if sticky is not None:
            if len(self._sticky) > _REMEMBERED:
                self._sticky.clear()
            before = self._sticky.setdefault(sticky, slot.worker.actor)
            slot = next((s for s in self._dispatcher.slots if s.worker.actor is before), slot)
            self._sticky[sticky] = slot.worker.actor
        return slot

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`. Raise if the pool is closed or the deadline passes."""
        try:
            async with asyncio.timeout(self._start_s):
                while self._stopped is None and not ready():
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{self.role}: work waited {self._start_s:g} s for a live replica ({self.deaths} deaths)"
            ) from None
        if self._stopped is not None:
            raise self._stopped

    def _note_death(self, place: _Place, actor: Any, died: WorkerDied) -> None:
        """Restart the replica, if this work is the first to notice. Raise other deaths."""
        if died.actor != actor_id(actor):
            raise died
        if self._stopped is None and place.actor is actor:
            place.actor = None
            ray.kill(actor)  # it may only be out of reach, and must not run beside the next one
            self._count(place, died)
            if self._stopped is None:
                place.restart = asyncio.ensure_future(self._restart(place))
        if self._stopped is not None:
            raise self._stopped

    def _count(self, place: _Place, died: WorkerDied) -> None:
        self.deaths += 1
        place.death = died.reason
        allowed = f"{self._max_deaths} are allowed"
        self._on_death(f"{self.role} {place.number} died (death {self.deaths}, {allowed}): {died.reason}")
        if self.deaths > self._max_deaths:
            self._stop(
                ClusterError(
                    f"{self.role}: {self.deaths} deaths of workers, more than runtime.max_deaths = "
                    f"{self._max_deaths}; the last: {died}"
                )
            )

    async def _restart(self, place: _Place) -> None:
        while self._stopped is None:
            try:
                return await self._started(place)
            except WorkerDied as died:
                self._count(place, died)
            except Exception as error:  # nobody awaits this task: works see it as the pool's end
                end = ClusterError(f"{self.role} {place.number} could not be restarted: {error}")
                end.__cause__ = error
                return self._stop(end)

    async def _started(self, place: _Place) -> None:
        limit = asyncio.timeout(self._start_s)
        try:
            async with limit:
                place.actor = await self._make(place.number)
        except TimeoutError:
            if not limit.expired():
                raise
            what = f"{self.role} {place.number} was not ready after {self._start_s:g} s"
            raise DeadlineError(what) from None
        self._wake()

    def _stop(self, error: ClusterError) -> None:
        self._stopped = self._stopped or error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
