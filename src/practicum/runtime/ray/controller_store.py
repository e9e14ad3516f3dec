"""The store as the controller has it: keys and tags. Columns are for workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.store import Store
from practicum.runtime.ray.train_group import TrainGroup


class ControllerStore:
    """A Store that never brings a column into this process: reading or writing one is a bug, and says so."""

    def __init__(self, store: Store, group: TrainGroup) -> None:
        self._store, self._group = store, group

    def put(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the controller writes no columns: a worker does")

    def get(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the controller reads no columns: a worker does")

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        return self._store.batch(partition, keys)

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        self._store.tag(partition, tags)

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        self._store.clear(partition, keys)

    def size(self, partition: str | None = None) -> int:
        return self._store.size(partition)

    def save(self, path: Path) -> None:
        """Done by the first rank, with its share of a checkpoint."""
        raise AssertionError("the store is saved by the learner's first rank")

    def load(self, path: Path) -> None:
        """Done by the first rank."""
        raise AssertionError("the store is loaded by the learner's first rank")
