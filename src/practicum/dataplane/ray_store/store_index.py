"""The index of a store: an actor that knows each row's key, tags, lengths, and where its columns are.

It carries out one call after the other, so readers see the whole of a put or nothing of it. It holds no
tensors except the bytes of puts that are too small for a separate object. Imports no torch, so that it starts
quickly.

Keys and tags are plain tuples here. Arguments and results travel as pickled bytes, with object references
beside them: Ray is about twenty times slower than pickle on nested tuples, but must see references itself,
because it counts them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from practicum.dataplane.row_table import PlainKey, RowTable
from practicum.dataplane.wire import Rows
from practicum.errors import StoreError

_ACTOR: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
"""Options of index and copiers. Ray would report each of their calls to the head."""
_CONCURRENT_CALLS = 10_000
"""Calls that may be in flight at the same time, such as puts that are being copied."""


class Put(NamedTuple):
    """One put: its rows, the tokens of each by extent, and where its columns are.

    Without `tags` the rows must exist and keep theirs. `locator` is opaque to the index: an object reference
    or bytes by which the store finds the columns.
    """

    partition: str
    keys: list[PlainKey]
    tags: list[tuple[Any, ...]] | None
    spans: dict[str, list[int]]
    fields: tuple[str, ...]
    locator: Any


class ColumnLocations(NamedTuple):
    """The locators of puts, and for each row of each field the number of its put and the row there."""

    locators: list[Any]
    columns: dict[str, list[tuple[int, int]]]


@dataclass(slots=True, eq=False)
class _Source:
    """A put that is referred to by `cells` (row, field) pairs. It is freed with the last of them."""

    locator: Any
    cells: int


_Cell = tuple[_Source, int]


class RowLocations(RowTable[_Cell]):
    """Rows whose cells are in puts. Calls that drop the last cell of a put return its locator."""

    def commit(self, put: Put) -> list[Any]:
        source = _Source(put.locator, len(put.keys) * len(put.fields))
        cells = [[(source, i)] * len(put.fields) for i in range(len(put.keys))]
        return _freed(self.put(put.partition, put.keys, put.tags, put.spans, put.fields, cells))

    def clear(self, partition: str, keys: Sequence[PlainKey] | None) -> list[Any]:
        return _freed(super().clear(partition, keys))

    def locate(self, partition: str, keys: Sequence[PlainKey], names: Sequence[str]) -> ColumnLocations:
        """Return where these fields of these rows are. Raise StoreError if a row or a field is missing."""
        numbers: dict[_Source, int] = {}
        columns = {
            name: [
                (numbers.setdefault(source, len(numbers)), row)
                for source, row in self.cells(partition, keys, name)
            ]
            for name in names
        }
        return ColumnLocations([source.locator for source in numbers], columns)

    def groups(self) -> list[tuple[str, list[PlainKey], list[str]]]:
        """Return partition, keys and fields of rows whose fields are in the same puts."""
        return self.alike(lambda cell: cell[0])


def _freed(cells: Iterable[_Cell]) -> list[Any]:
    """Drop cells, and return the locators of the puts of which none is left."""
    freed = []
    for source, _ in cells:
        source.cells -= 1
        if not source.cells:
            freed.append(source.locator)
    return freed


class PutCopier:
    """Copies packed puts on one node. Stateless, so Ray may restart it at any time.

    An object in Ray's store dies with the process that put it, but the result of a call belongs to the
    caller: the index calls a copier, and the copy lives as long as the index does.
    """

    def copy(self, packed: Any) -> tuple[Any, bool]:
        """Return the put as an object that belongs to the caller, and a sign that it is complete."""
        return packed, True


class StoreIndex:
    """The actor. With `report_freed`, commits and clears return the locators that nothing refers to."""

    def __init__(self, report_freed: bool = False) -> None:
        self._rows, self._report_freed = RowLocations(), report_freed
        self._copiers: dict[str, Any] = {}
        self._pending: dict[str, set[asyncio.Future[None]]] = {}
        """By partition, the ends of puts that are being copied."""

    async def call(self, method: str, args: bytes, refs: Sequence[Any] = ()) -> tuple[bytes, list[Any]]:
        """Call a method of `RowLocations` with pickled arguments; `decode_answer` reads the result."""
        arguments = pickle.loads(args)
        if method == "commit":
            result = await self._commit(*arguments, *refs)
        else:
            whole = method == "clear" or (method == "batch" and arguments[1] is None)
            if whole and (pending := self._pending.get(arguments[0])):
                await asyncio.wait(pending)
            result = getattr(self._rows, method)(*arguments)
            if method == "batch":
                keys, tags = result
                result = Rows(tags), None if arguments[1] is not None else Rows(keys)
        if method in ("commit", "clear") and not self._report_freed:
            result = []
        found: list[Any] = []
        if isinstance(result, ColumnLocations):
            found = [locator for locator in result.locators if isinstance(locator, ObjectRef)]
            number = {ref: i for i, ref in enumerate(found)}
            plain = [number[at] if isinstance(at, ObjectRef) else at for at in result.locators]
            result = result._replace(locators=plain)
        return pickle.dumps(result, protocol=5), found

    async def expect(self, node: str) -> None:
        """Start a copier on that node, before the first put there."""
        if node not in self._copiers:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            options = _ACTOR | {"max_restarts": -1, "max_task_retries": 3, "scheduling_strategy": where}
            self._copiers[node] = ray.remote(PutCopier).options(**options).remote()

    async def _commit(self, put: Put, node: str | None = None, ref: Any = None) -> list[Any]:
        """Take a put. `ref` is its object in Ray's store, copied on `node` if it dies with the writer."""
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

    async def _copy(self, ref: Any, node: str) -> Any:
        await self.expect(node)
        copy, done = self._copiers[node].copy.options(num_returns=2).remote(ref)
        try:
            await done
        except RayError as error:
            raise StoreError(f"a put could not be copied out of its writer's process: {error}") from None
        return copy


def decode_answer(answer: tuple[bytes, list[Any]]) -> Any:
    result, refs = pickle.loads(answer[0]), answer[1]
    if isinstance(result, ColumnLocations):
        return result._replace(locators=[refs[at] if isinstance(at, int) else at for at in result.locators])
    return result


def start_index(report_freed: bool = False, where: Any = "DEFAULT") -> Any:
    """Start the index, an actor without a CPU, `where` its readers are. It ends with this process."""
    options = _ACTOR | {"max_concurrency": _CONCURRENT_CALLS, "max_restarts": 0, "scheduling_strategy": where}
    return ray.remote(StoreIndex).options(**options).remote(report_freed)
