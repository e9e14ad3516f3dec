"""The index of a store: one small actor that knows each row's key, tags and where its columns are.

It carries out one call after the other, so readers see the whole of a put or nothing of it. It holds no
tensors except those of puts that are too small for an object of their own.

Arguments and results travel as pickled bytes, with object references beside them: Ray is about twenty times
slower than pickle on nested tuples, but must see references itself, because it counts them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from practicum.dataplane.ray_store.row_locations import ColumnLocations, Put, RowLocations
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


def decode_answer(answer: Answer) -> Any:
    """What a call returned."""
    if isinstance(answer, bytes):
        return pickle.loads(answer)
    result, refs = pickle.loads(answer[0]), answer[1]
    return result._replace(locators=[refs[at] if isinstance(at, int) else at for at in result.locators])


def _encode(result: Any) -> Answer:
    if not isinstance(result, ColumnLocations):
        return pickle.dumps(result, protocol=5)
    refs, locators = [], []
    for locator in result.locators:
        if isinstance(locator, ObjectRef):
            refs.append(locator)
            locator = len(refs) - 1
        locators.append(locator)
    return pickle.dumps(result._replace(locators=locators), protocol=5), refs


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
    """The actor; `RayStore` calls it.

    `report_freed`: commits and clears return the locators that nothing refers to any more.
    """

    def __init__(self, report_freed: bool = False) -> None:
        self._rows = RowLocations()
        self._copiers: dict[str, _Copier] = {}
        self._pending: dict[str, set[asyncio.Future[None]]] = {}
        """By partition, the ends of puts that are being copied."""
        self._report_freed = report_freed

    async def call(self, method: str, args: bytes, refs: Sequence[Any] = ()) -> Answer:
        """Call a method of `RowLocations` with pickled arguments.

        What is read or cleared of a whole partition includes puts that are under way there.
        """
        arguments = pickle.loads(args)
        if method == "commit":
            result = await self._commit(*arguments, *refs)
        else:
            if method == "clear" or (method == "batch" and arguments[1] is None):
                await self._settled(arguments[0])
            result = getattr(self._rows, method)(*arguments)
        if method in ("commit", "clear") and not self._report_freed:
            result = []
        return _encode(result)

    async def expect(self, node: str) -> None:
        """Start a copier on that node, before the first pack is put there."""
        self._copier(node)

    async def _commit(self, put: Put, node: str | None = None, ref: Any = None) -> list[Any]:
        """Take a put; what it replaces is freed once no other row refers to it.

        `ref` is its pack, if that is in Ray's object store; copied on `node`, if it dies with the writer.
        """
        done = asyncio.get_running_loop().create_future()
        pending = self._pending.setdefault(put.partition, set())
        pending.add(done)
        try:
            if ref is not None:
                put = put._replace(locator=ref if node is None else await self._copy(ref, node))
            return self._rows.commit(put)
        finally:
            pending.remove(done)
            done.set_result(None)

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


def start_index(report_freed: bool = False) -> Any:
    """The index as an actor; it counts as no CPU of the cluster, and ends with the process that starts it."""
    actor = ray.remote(StoreIndex).options(num_cpus=0, max_concurrency=_CONCURRENT_CALLS, max_restarts=0)
    return actor.remote(report_freed)
