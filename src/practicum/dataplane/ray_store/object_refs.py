"""How calls of the index travel: as bytes of pickle, and references to objects beside them.

Ray packs nested tuples some twenty times slower than pickle does, but takes bytes as they are. Only
references must pass through its own hands, because it counts them.
"""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ray import ObjectRef

from practicum.dataplane.ray_store.row_locations import Located, Put, Snapshot

Answer = bytes | tuple[bytes, list[Any]]
"""A pickled result, with the references that belong into its locators if it has such."""


class Parcel(NamedTuple):
    """A pack that a worker put into Ray's object store.

    `node` is where the worker did, if the pack is to outlast it.
    """

    ref: Any
    node: str | None


class _Beside(NamedTuple):
    """Stands for a reference: its number among those that travel beside the bytes."""

    number: int


def pack_call(args: Sequence[Any]) -> tuple[bytes, list[Any]]:
    """Arguments of a call; puts among them, or a list of puts, may have parcels as locators."""
    refs: list[Any] = []
    plain = [_each_put(arg, lambda put: _without_ref(put, refs)) for arg in args]
    return pickle.dumps(plain, protocol=5), refs


def unpack_answer(answer: Answer) -> Any:
    """What a call returned."""
    if isinstance(answer, bytes):
        return pickle.loads(answer)
    found, refs = pickle.loads(answer[0]), answer[1]
    where = [refs[at.number] if isinstance(at, _Beside) else at for at in found.locators]
    return found._replace(locators=where)


def on_wire(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Answer]]:
    """An actor's method as it is called from elsewhere, with bytes and references."""

    async def call(self: Any, args: bytes, refs: list[Any]) -> Answer:
        plain = [_each_put(arg, lambda put: _with_ref(put, refs)) for arg in pickle.loads(args)]
        result = await method(self, *plain)
        if isinstance(result, Located | Snapshot):
            return _pack_found(result)
        return pickle.dumps(result, protocol=5)

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


def _pack_found(found: Located | Snapshot) -> Answer:
    refs, where = [], []
    for at in found.locators:
        if isinstance(at, ObjectRef):
            refs.append(at)
            at = _Beside(len(refs) - 1)
        where.append(at)
    return pickle.dumps(found._replace(locators=where), protocol=5), refs


def _each_put(arg: Any, change: Callable[[Put], Put]) -> Any:
    if isinstance(arg, Put):
        return change(arg)
    if isinstance(arg, list) and arg and isinstance(arg[0], Put):
        return [change(put) for put in arg]
    return arg


def _without_ref(put: Put, refs: list[Any]) -> Put:
    if not isinstance(put.locator, Parcel):
        return put
    refs.append(put.locator.ref)
    return put._replace(locator=put.locator._replace(ref=_Beside(len(refs) - 1)))


def _with_ref(put: Put, refs: Sequence[Any]) -> Put:
    if not isinstance(put.locator, Parcel):
        return put
    return put._replace(locator=put.locator._replace(ref=refs[put.locator.ref.number]))
