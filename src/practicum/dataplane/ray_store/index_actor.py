"""The index: one small actor that holds keys, tags and readiness, and wakes who waits.

Each call is carried out whole before the next begins, so what one call does is seen whole or not at
all. It holds no tensors but those of puts so small that an object of their own would cost more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from practicum.dataplane.ray_store.keeper_actor import start_keeper
from practicum.dataplane.ray_store.object_refs import Parcel, on_wire
from practicum.dataplane.ray_store.row_locations import (
    Located,
    PlainKey,
    PlainTags,
    Put,
    RowLocations,
    Snapshot,
)
from practicum.dataplane.rowspans import describe_lacking
from practicum.errors import DeadlineError, StoreError

_AT_ONCE = 10_000
"""Calls that may be under way at the same time: nearly all of them wait for rows."""


class _Keeper(NamedTuple):
    actor: Any
    turn: asyncio.Lock


@dataclass(slots=True, eq=False)
class _Waiter:
    keys: list[PlainKey]
    fields: tuple[str, ...]
    lacking: dict[PlainKey, list[str] | None]
    arrived: asyncio.Future[list[PlainTags]]


class Index:
    """The actor, called through an IndexClient.

    `report_freed`: commits and clears return the locators that nothing refers to any more.
    """

    def __init__(self, report_freed: bool = False) -> None:
        self._held = RowLocations()
        self._waiters: dict[str, list[_Waiter]] = {}
        self._keepers: dict[str, _Keeper] = {}
        self._coming: dict[str, set[asyncio.Future[None]]] = {}
        """By partition, ends of the puts that are being copied."""
        self._report_freed = report_freed

    @on_wire
    async def commit(self, put: Put) -> list[Any]:
        """Take a put; what was replaced by it and is in no other row is freed."""
        done = asyncio.get_running_loop().create_future()
        coming = self._coming.setdefault(put.partition, set())
        coming.add(done)
        try:
            freed = self._held.commit(await self._own(put))
        finally:
            coming.remove(done)
            done.set_result(None)
        self._wake(put.partition, put.keys)
        return self._freed(freed)

    @on_wire
    async def locate(self, partition: str, keys: list[PlainKey], fields: tuple[str, ...]) -> Located:
        """Where these fields of these rows are."""
        return self._held.locate(partition, keys, fields)

    @on_wire
    async def batch(self, partition: str) -> tuple[list[PlainKey], list[PlainTags]]:
        """Keys and tags of a whole partition, and of what was being put when this was asked."""
        await self._arrived(partition)
        keys = self._held.keys(partition)
        return keys, self._held.tags(partition, keys)

    @on_wire
    async def tags(self, partition: str, keys: list[PlainKey]) -> list[PlainTags]:
        """Tags of these rows."""
        return self._held.tags(partition, keys)

    @on_wire
    async def tag(self, partition: str, keys: list[PlainKey], tags: list[PlainTags]) -> None:
        """Replace tags."""
        self._held.tag(partition, keys, tags)
        self._wake(partition, keys)

    @on_wire
    async def wait(
        self, partition: str, keys: list[PlainKey], fields: tuple[str, ...], timeout: float, owner: str
    ) -> list[PlainTags]:
        """The tags of these rows as soon as each has every field or has failed."""
        lacking = self._held.lacking(partition, keys, fields)
        if not lacking:
            return self._held.tags(partition, keys)
        waiter = _Waiter(keys, fields, lacking, asyncio.get_running_loop().create_future())
        waiters = self._waiters.setdefault(partition, [])
        waiters.append(waiter)
        try:
            return await asyncio.wait_for(waiter.arrived, max(timeout, 0.0))
        except TimeoutError:
            lacking = self._held.lacking(partition, keys, fields)
            raise DeadlineError(
                f"{owner} waited {timeout:g} s for {len(keys)} rows of partition {partition!r}, and "
                f"{len(lacking)} did not come: {describe_lacking(lacking)}"
            ) from None
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.get(partition) is waiters:
                del self._waiters[partition]

    @on_wire
    async def clear(self, partition: str, keys: list[PlainKey] | None) -> list[Any]:
        """Forget rows, also those being put; puts of which no cell is left are freed."""
        await self._arrived(partition)
        return self._freed(self._held.clear(partition, keys))

    @on_wire
    async def size(self, partition: str | None) -> int:
        """How many rows are held."""
        return self._held.size(partition)

    @on_wire
    async def snapshot(self) -> Snapshot:
        """Everything that is held now."""
        return self._held.snapshot()

    @on_wire
    async def expect(self, node: str) -> None:
        """Objects will be put on that node: have a keeper there before the first one is."""
        self._keeper(node)

    @on_wire
    async def replace(self, puts: list[Put]) -> list[Any]:
        """Hold what these puts make, and nothing else."""
        new = RowLocations()
        for put in await asyncio.gather(*map(self._own, puts)):
            new.commit(put)
        freed = [locator for name in self._held.partitions() for locator in self._held.clear(name, None)]
        self._held = new
        for partition in new.partitions():
            self._wake(partition, new.keys(partition))
        return self._freed(freed)

    def _keeper(self, node: str) -> _Keeper:
        keeper = self._keepers.get(node)
        if keeper is None:
            keeper = self._keepers[node] = _Keeper(start_keeper(node), asyncio.Lock())
        return keeper

    async def _own(self, put: Put) -> Put:
        """The put, with an object of this process in place of one that dies with who put it."""
        if not isinstance(put.locator, Parcel):
            return put
        ref, node = put.locator
        return put._replace(locator=ref if node is None else await self._copy(ref, node))

    async def _copy(self, ref: Any, node: str) -> Any:
        keeper = self._keeper(node)
        async with keeper.turn:
            copy, done = keeper.actor.copy.options(num_returns=2).remote(ref)
            try:
                await done
            except RayError as error:
                raise StoreError(
                    f"a put could not be copied, so that it outlasts who made it: {error}"
                ) from None
            return copy

    async def _arrived(self, partition: str) -> None:
        """Until what is now being put there is held, or lost with the process that put it."""
        if coming := self._coming.get(partition):
            await asyncio.wait(coming)

    def _freed(self, freed: list[Any]) -> list[Any]:
        return freed if self._report_freed else []

    def _wake(self, partition: str, changed: Iterable[PlainKey]) -> None:
        """End the waits of those for whom the last row came."""
        for waiter in self._waiters.get(partition, ()):
            came = [key for key in changed if key in waiter.lacking]
            if not came or waiter.arrived.done():
                continue
            still = self._held.lacking(partition, came, waiter.fields)
            for key in came:
                if key not in still:
                    del waiter.lacking[key]
            if waiter.lacking:
                continue
            # A row that had come may have been cleared meanwhile: all of them once more.
            waiter.lacking = self._held.lacking(partition, waiter.keys, waiter.fields)
            if not waiter.lacking:
                waiter.arrived.set_result(self._held.tags(partition, waiter.keys))


def start_index(report_freed: bool = False) -> Any:
    """The index as an actor; it takes no CPU from the cluster's count and ends with who starts it."""
    actor = ray.remote(Index).options(num_cpus=0, max_concurrency=_AT_ONCE, max_restarts=0)
    return actor.remote(report_freed)
