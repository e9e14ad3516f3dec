"""Replicas of one role: the next work goes to the least loaded one, and dead ones are restarted."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from practicum.concurrency.gather import gather_all
from practicum.errors import ClusterError, DeadlineError
from practicum.runtime.ray.actor_calls import WorkerDied, ask_async

T = TypeVar("T")
_REMEMBERED = 16_384
"""Sticky keys that are kept; the one longest unused is forgotten first."""


@dataclass(slots=True, eq=False)
class _Place:
    """One replica: its current actor (None while it restarts) and its work."""

    number: int
    actor: Any = None
    works: int = 0
    load: float = 0.0
    total_load: float = 0.0
    """All load it ever got: of two that are equally busy, the one with less is next."""
    restart: asyncio.Task[None] | None = None


class ReplicaPool:
    """Workers of one role, for the coroutines of one event loop.

    `make(replica)` starts a worker, waits until it can take work (with current weights) and returns its
    handle; if it fails it leaves no actor running. A death is a WorkerDied whose `actor` is the
    replica's own; after more than max_deaths of them every work ends with a ClusterError.
    """

    def __init__(
        self,
        role: str,
        make: Callable[[int], Awaitable[Any]],
        count: int,
        max_deaths: int,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self.role, self.count, self.deaths, self.reruns = role, count, 0, 0
        self._make, self._max_deaths, self._on_death = make, max_deaths, on_death
        self._start_s = 0.0
        self._places = [_Place(number) for number in range(count)]
        self._sticky: OrderedDict[Hashable, Any] = OrderedDict()  # key → the actor it went to
        self._stopped: ClusterError | None = None
        self._changed = asyncio.Event()

    async def start(self, timeout: float) -> None:
        """Start all replicas at once; if one can't, the others are stopped and its error is raised.

        The timeout is also that of each later restart, and of the wait of a work for a live replica.
        """
        self._start_s = timeout
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
        """Do a work on the least loaded replica, or where works of the same `sticky` key went before.

        If the replica dies meanwhile, `again` is awaited (to clean up half-done work) and the work runs once
        more on a live one. Other errors of the work are raised as they are.
        """
        while True:
            place = await self._free_place(sticky)
            with _busy(place, load):
                actor = place.actor
                try:
                    return await work(actor)
                except WorkerDied as died:
                    self._note_death(place, actor, died)
            if again is not None:
                await again()
            self.reruns += 1

    async def each(self, work: Callable[[Any], Awaitable[T]]) -> list[T]:
        """Do a work that may be repeated, such as loading weights, on every replica at once.

        It waits for replicas that are starting, and is repeated on those that die meanwhile.
        """
        return await gather_all(self._on_place(place, work) for place in self._places)

    def calling(self, method: str, *args: Any, timeout: float) -> Callable[[Any], Awaitable[Any]]:
        """The work that is a call of a replica's method, with a deadline."""

        async def work(worker: Any) -> Any:
            call, who = getattr(worker, method).remote(*args), self.name_of(worker)
            return await ask_async(call, timeout=timeout, owner="the controller", who=who)

        return work

    def loads(self) -> list[float]:
        """Load under way on each replica."""
        return [place.load for place in self._places]

    def replicas(self) -> list[Any]:
        """Handles of those that are alive, as far as is known."""
        return [place.actor for place in self._places if place.actor is not None]

    def name_of(self, actor: Any) -> str:
        """A replica's name, for errors."""
        return next((name for name, one in self.named_replicas() if one is actor), f"a {self.role} worker")

    def named_replicas(self) -> list[tuple[str, Any]]:
        """As `replicas`, each with its name."""
        return [
            (f"{self.role} {place.number}", place.actor) for place in self._places if place.actor is not None
        ]

    async def close(self) -> None:
        """Stop all replicas; works under way and later ones end with a ClusterError."""
        self._stop(ClusterError(f"{self.role}: its workers are stopped"))
        restarts = [place.restart for place in self._places if place.restart is not None]
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        for place in self._places:
            if place.actor is not None:
                ray.kill(place.actor)
                place.actor = None

    async def _on_place(self, place: _Place, work: Callable[[Any], Awaitable[T]]) -> T:
        while True:
            await self._until(lambda: place.actor is not None)
            actor = place.actor
            try:
                return await work(actor)
            except WorkerDied as died:
                self._note_death(place, actor, died)

    async def _free_place(self, sticky: Hashable | None) -> _Place:
        await self._until(lambda: any(place.actor is not None for place in self._places))
        live = [place for place in self._places if place.actor is not None]
        before = self._sticky.get(sticky) if sticky is not None else None
        place = next((p for p in live if p.actor is before), None)
        if place is None:
            place = min(live, key=lambda p: (p.load, p.total_load, p.number))
        if sticky is not None:
            self._sticky[sticky] = place.actor
            self._sticky.move_to_end(sticky)
            if len(self._sticky) > _REMEMBERED:
                self._sticky.popitem(last=False)
        return place

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`; the pool's end and the deadline are errors."""
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
        """Restart the replica, if this work is the first to notice; raise other deaths."""
        if died.actor != actor._actor_id.hex():
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
        if self._on_death is not None:
            self._on_death(
                f"{self.role} {place.number} died (death {self.deaths}, {self._max_deaths} are allowed): "
                f"{died.reason}"
            )
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


@contextmanager
def _busy(place: _Place, load: float) -> Iterator[None]:
    place.works, place.load, place.total_load = place.works + 1, place.load + load, place.total_load + load
    try:
        yield
    finally:
        place.works -= 1
        place.load = place.load - load if place.works else 0.0  # sums of fractions may not return to zero
