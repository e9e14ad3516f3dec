"""The index as a store sees it: keys and tags as they are known elsewhere, deadlines, and errors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from practicum.dataplane.batch import BatchRef, check_distinct
from practicum.dataplane.check_columns import field_of
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ray_store.object_refs import pack_call, unpack_answer
from practicum.dataplane.ray_store.row_locations import Located, PlainKey, PlainTags, Put, Snapshot
from practicum.errors import DeadlineError, PracticumError, StoreError

_TAGS = tuple(field.name for field in fields(Tags))
assert _TAGS[0] == "status", "the index reads the status of a row where it is the first of its tags"

_REFS = threading.Lock()
"""Held while references to objects come into this process or leave it.

Ray loses an object if one thread lets go of it at the moment in which another is given it: whoever
reads it then waits forever.
"""

plain_tags = attrgetter(*_TAGS)
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

    Those that free puts return their locators if the index was started to report them.
    """

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor, self._timeout_s = actor, timeout_s

    def commit(self, put: Put) -> list[Any]:
        """Make a put seen, whole or not at all."""
        return self._call("commit", put)

    def locate(self, batch: BatchRef, names: Sequence[str]) -> Located:
        """Where these fields of the batch's rows are. If they are objects of Ray's, `release` them."""
        args = (batch.partition, plain_keys(batch.keys), tuple(names))
        return self._call("locate", *args, brings_refs=True)

    def release(self, found: Located | Snapshot) -> None:
        """What was located has been read; forgets the locators."""
        with _REFS:
            found.locators.clear()

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags."""
        if keys is None:
            found, tags = self._call("batch", partition)
            keys = [Key._make(key) for key in found]
        else:
            tags = self._call("tags", partition, plain_keys(keys))
        return _batch(partition, keys, tags)

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        self._call("tag", partition, plain_keys(tuple(tags)), [plain_tags(tag) for tag in tags.values()])

    def wait(
        self, partition: str, keys: Sequence[Key], names: Sequence[str], *, timeout: float, owner: str
    ) -> BatchRef:
        """Until every row has every field or has failed."""
        names = tuple(field_of(name).name for name in names)
        check_distinct(keys, f"what {owner} waits for")
        args = (partition, plain_keys(keys), names, timeout, owner)
        return _batch(partition, keys, self._call("wait", *args, patience=max(timeout, 0.0)))

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> list[Any]:
        """Forget rows."""
        return self._call("clear", partition, None if keys is None else plain_keys(keys))

    def size(self, partition: str | None = None) -> int:
        """How many rows are held."""
        return self._call("size", partition)

    def snapshot(self) -> Snapshot:
        """Everything that is held now; to be released as what `locate` gives."""
        return self._call("snapshot", brings_refs=True)

    def expect(self, node: str) -> None:
        """Objects will be put on that node; nobody waits for this to be heard."""
        self._actor.expect.remote(*pack_call((node,)))

    def replace(self, puts: Sequence[Put]) -> list[Any]:
        """Hold what these puts make, and nothing else."""
        return self._call("replace", list(puts))

    def _call(self, method: str, *args: object, patience: float = 0.0, brings_refs: bool = False) -> Any:
        """What the index answers; its own errors as they were raised there."""
        timeout = self._timeout_s + patience
        call = getattr(self._actor, method).remote(*pack_call(args))
        try:
            if not brings_refs:
                return unpack_answer(ray.get(call, timeout=timeout))
            ray.wait([call], timeout=timeout)
            with _REFS:
                return unpack_answer(ray.get(call, timeout=0))
        except RayTaskError as error:
            if isinstance(error.cause, PracticumError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise StoreError(
                f"the store's index died, and with it all that the store held ({method} was asked of it): "
                f"resume the run from its last checkpoint. Ray says: {_first_line(error)}"
            ) from error
        except GetTimeoutError:
            raise DeadlineError(
                f"the store's index did not answer {method} within {timeout:g} s: its node may be "
                "overloaded or cut off; runtime.store_s is the time that a call may take"
            ) from None


def _batch(partition: str, keys: Sequence[Key], tags: Sequence[PlainTags]) -> BatchRef:
    return BatchRef(partition, tuple(keys), tuple(Tags(*values) for values in tags))


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
