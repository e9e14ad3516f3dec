"""The store's index as its users see it: typed keys and tags, deadlines, and errors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ray_store.index_actor import decode_answer, encode_call
from practicum.dataplane.ray_store.row_locations import ColumnLocations, PlainKey, PlainTags, Put, Snapshot
from practicum.errors import DeadlineError, PracticumError, StoreError

_REFS = threading.Lock()
"""Held while object references come into this process or leave it.

Ray loses an object if one thread drops its last reference while another receives one; reading it then hangs.
"""

plain_tags = attrgetter(*(field.name for field in fields(Tags)))
"""Tags as the index holds them."""


def plain_keys(keys: Sequence[Key]) -> list[PlainKey]:
    """Keys as the index holds them."""
    return [(prompt, session, trajectory) for prompt, session, trajectory in keys]


def plain_put(batch: BatchRef, spans: dict[str, list[int]], names: Sequence[str], locator: Any) -> Put:
    """A put of checked columns, whose bytes are at `locator`."""
    tags = [plain_tags(tags) for tags in batch.tags]
    return Put(batch.partition, plain_keys(batch.keys), tags, spans, tuple(names), locator)


class IndexClient:
    """Calls to an index actor, from any thread; each has `timeout_s` seconds.

    Calls that free puts return their locators if the index was started to report them.
    """

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor, self._timeout_s = actor, timeout_s

    def commit(self, put: Put) -> list[Any]:
        """Make a put visible, all of it or nothing."""
        return self._call("commit", put)

    def locate(self, batch: BatchRef, names: Sequence[str]) -> ColumnLocations:
        """Where these fields of the batch's rows are; `release` the result after reading."""
        args = (batch.partition, plain_keys(batch.keys), tuple(names))
        return self._call("locate", *args, returns_refs=True)

    def release(self, locations: ColumnLocations | Snapshot) -> None:
        """Forget the locators: they have been read."""
        with _REFS:
            locations.locators.clear()

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags."""
        tags: Sequence[PlainTags]
        if keys is None:
            all_keys, tags = self._call("batch", partition)
            keys = [Key._make(key) for key in all_keys]
        else:
            tags = self._call("tags", partition, plain_keys(keys))
        return BatchRef(partition, tuple(keys), tuple(Tags(*values) for values in tags))

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        self._call("tag", partition, plain_keys(tuple(tags)), [plain_tags(tag) for tag in tags.values()])

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> list[Any]:
        """Forget rows."""
        return self._call("clear", partition, None if keys is None else plain_keys(keys))

    def size(self, partition: str | None = None) -> int:
        """How many rows there are."""
        return self._call("size", partition)

    def snapshot(self) -> Snapshot:
        """Everything, at this moment; `release` the result after reading."""
        return self._call("snapshot", returns_refs=True)

    def expect(self, node: str) -> None:
        """Say that packs will be put on that node; does not wait for the index."""
        self._actor.expect.remote(*encode_call((node,)))

    def replace(self, puts: Sequence[Put]) -> list[Any]:
        """Forget everything, then take these puts."""
        return self._call("replace", list(puts))

    def _call(self, method: str, *args: object, returns_refs: bool = False) -> Any:
        """What the index answers; its own errors as they were raised there."""
        call = getattr(self._actor, method).remote(*encode_call(args))
        try:
            if not returns_refs:
                return decode_answer(ray.get(call, timeout=self._timeout_s))
            ray.wait([call], timeout=self._timeout_s)
            with _REFS:
                return decode_answer(ray.get(call, timeout=0))
        except RayTaskError as error:
            if isinstance(error.cause, PracticumError):
                raise error.cause from None
            raise
        except RayActorError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise StoreError(
                f"the store's index died, and all rows of the store with it (during {method}): "
                f"resume the run from its last checkpoint. Ray says: {reason}"
            ) from error
        except GetTimeoutError:
            raise DeadlineError(
                f"the store's index did not answer {method} within {self._timeout_s:g} s: its node may be "
                "overloaded or cut off; runtime.store_s is the time that a call may take"
            ) from None
