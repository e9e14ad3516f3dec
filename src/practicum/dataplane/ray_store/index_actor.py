"""The index of a store: one small actor that knows each row's key, tags and where its columns are.

It carries out one call after the other, so readers see the whole of a put or nothing of it. It holds no
tensors except those of puts that are too small for an object of their own.

Arguments and results travel as pickled bytes, with object references beside them: Ray is about twenty times
slower than pickle on nested tuples, but must see references itself, because it counts them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from practicum.dataplane.ray_store.row_locations import (
    ColumnLocations,
    PlainKey,
    PlainTags,
    Put,
    RowLocations,
    Snapshot,
)
from practicum.errors import StoreError

_CONCURRENT_CALLS = 10_000
"""Calls that may be under way at the same time, such as puts that are being copied."""

Answer = bytes | tuple[bytes, list[Any]]
"""A pickled result, with the object references of its locators if it has any."""


class SharedPack(NamedTuple):
    """The locator of a pack that a worker put into Ray's object store.

    `node` is where the worker runs, if the pack is to outlive it.
    """

    ref: Any
    node: str | None


class _RefNumber(NamedTuple):
    """Stands for a reference: its position among those that travel beside the bytes."""

    number: int


def encode_call(args: Sequence[Any]) -> tuple[bytes, list[Any]]:
    """Arguments of a call. Puts among them, or in a list, may have SharedPacks as locators."""
    refs: list[Any] = []

    def take_out(put: Put) -> Put:
        if not isinstance(put.locator, SharedPack):
            return put
        refs.append(put.locator.ref)
        return put._replace(locator=put.locator._replace(ref=_RefNumber(len(refs) - 1)))

    plain = [_map_puts(arg, take_out) for arg in args]
    return pickle.dumps(plain, protocol=5), refs


def decode_answer(answer: Answer) -> Any:
    """What a call returned."""
    if isinstance(answer, bytes):
        return pickle.loads(answer)
    result, refs = pickle.loads(answer[0]), answer[1]
    locators = [refs[at.number] if isinstance(at, _RefNumber) else at for at in result.locators]
    return result._replace(locators=locators)


def _remote(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Answer]]:
    """The method with encoded arguments and an encoded result."""

    async def call(self: Any, args: bytes, refs: list[Any]) -> Answer:
        def put_back(put: Put) -> Put:
            if not isinstance(put.locator, SharedPack):
                return put
            return put._replace(locator=put.locator._replace(ref=refs[put.locator.ref.number]))

        result = await method(self, *(_map_puts(arg, put_back) for arg in pickle.loads(args)))
        if isinstance(result, ColumnLocations | Snapshot):
            return _encode_locations(result)
        return pickle.dumps(result, protocol=5)

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


def _encode_locations(result: ColumnLocations | Snapshot) -> Answer:
    refs, locators = [], []
    for locator in result.locators:
        if isinstance(locator, ObjectRef):
            refs.append(locator)
            locator = _RefNumber(len(refs) - 1)
        locators.append(locator)
    return pickle.dumps(result._replace(locators=locators), protocol=5), refs


def _map_puts(arg: Any, change: Callable[[Put], Put]) -> Any:
    if isinstance(arg, Put):
        return change(arg)
    if isinstance(arg, list) and arg and isinstance(arg[0], Put):
        return [change(put) for put in arg]
    return arg


class PackCopier:
    """Copies packs on one node. Stateless, so it may be restarted at any time.

    An object in Ray's store dies with the process that put it, but the result of a call belongs to the
    caller: the index calls a copier, and the copy lives as long as the index does.
    """

    def copy(self, pack: Any) -> tuple[Any, bool]:
        """The pack, as an object that belongs to the caller; and a sign that it is there."""
        return pack, True


class _Copier(NamedTuple):
    actor: Any
    lock: asyncio.Lock


class StoreIndex:
    """The actor, called through an IndexClient.

    `report_freed`: commits and clears return the locators that nothing refers to any more.
    """

    def __init__(self, report_freed: bool = False) -> None:
        self._rows = RowLocations()
        self._copiers: dict[str, _Copier] = {}
        self._pending: dict[str, set[asyncio.Future[None]]] = {}
        """By partition, the ends of puts that are being copied."""
        self._report_freed = report_freed

    @_remote
    async def commit(self, put: Put) -> list[Any]:
        """Take a put; what it replaces is freed once no other row refers to it."""
        done = asyncio.get_running_loop().create_future()
        pending = self._pending.setdefault(put.partition, set())
        pending.add(done)
        try:
            freed = self._rows.commit(await self._copied(put))
        finally:
            pending.remove(done)
            done.set_result(None)
        return self._reported(freed)

    @_remote
    async def locate(self, partition: str, keys: list[PlainKey], fields: tuple[str, ...]) -> ColumnLocations:
        """Where these fields of these rows are."""
        return self._rows.locate(partition, keys, fields)

    @_remote
    async def batch(self, partition: str) -> tuple[list[PlainKey], list[PlainTags]]:
        """Keys and tags of a whole partition, including puts that are under way when this is called."""
        await self._settled(partition)
        keys = self._rows.keys(partition)
        return keys, self._rows.tags(partition, keys)

    @_remote
    async def tags(self, partition: str, keys: list[PlainKey]) -> list[PlainTags]:
        """Tags of these rows."""
        return self._rows.tags(partition, keys)

    @_remote
    async def tag(self, partition: str, keys: list[PlainKey], tags: list[PlainTags]) -> None:
        """Replace tags."""
        self._rows.tag(partition, keys, tags)

    @_remote
    async def clear(self, partition: str, keys: list[PlainKey] | None) -> list[Any]:
        """Forget rows, including those of puts that are under way; puts without rows are freed."""
        await self._settled(partition)
        return self._reported(self._rows.clear(partition, keys))

    @_remote
    async def size(self, partition: str | None) -> int:
        """How many rows there are."""
        return self._rows.size(partition)

    @_remote
    async def snapshot(self) -> Snapshot:
        """Everything, at this moment."""
        return self._rows.snapshot()

    @_remote
    async def expect(self, node: str) -> None:
        """Start a copier on that node, before the first pack is put there."""
        self._copier(node)

    @_remote
    async def replace(self, puts: list[Put]) -> list[Any]:
        """Forget everything, then take these puts."""
        rows = RowLocations()
        for put in await asyncio.gather(*map(self._copied, puts)):
            rows.commit(put)
        freed = [locator for name in self._rows.partitions() for locator in self._rows.clear(name, None)]
        self._rows = rows
        return self._reported(freed)

    def _copier(self, node: str) -> _Copier:
        copier = self._copiers.get(node)
        if copier is None:
            actor = ray.remote(PackCopier).options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=3,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            copier = self._copiers[node] = _Copier(actor.remote(), asyncio.Lock())
        return copier

    async def _copied(self, put: Put) -> Put:
        """The put, with an object of this process in place of one that dies with the writer."""
        if not isinstance(put.locator, SharedPack):
            return put
        ref, node = put.locator
        return put._replace(locator=ref if node is None else await self._copy(ref, node))

    async def _copy(self, ref: Any, node: str) -> Any:
        copier = self._copier(node)
        async with copier.lock:
            copy, done = copier.actor.copy.options(num_returns=2).remote(ref)
            try:
                await done
            except RayError as error:
                raise StoreError(f"a put could not be copied out of its writer's process: {error}") from None
            return copy

    async def _settled(self, partition: str) -> None:
        """Wait until the puts that are under way there have ended, or died with their writers."""
        if pending := self._pending.get(partition):
            await asyncio.wait(pending)

    def _reported(self, freed: list[Any]) -> list[Any]:
        return freed if self._report_freed else []


def start_index(report_freed: bool = False) -> Any:
    """The index as an actor; it counts as no CPU of the cluster, and ends with the process that starts it."""
    actor = ray.remote(StoreIndex).options(num_cpus=0, max_concurrency=_CONCURRENT_CALLS, max_restarts=0)
    return actor.remote(report_freed)
