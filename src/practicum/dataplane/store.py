"""The Store: holds tensors between the worker that writes and the worker that reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column


class Store(Protocol):
    """Rows by (partition, key); each row has fields and tags. All methods are safe from any thread.

    Rules, held by the conformance suite (tests/dataplane/conformance.py):
    - a missing key, a missing field, or a field that only some of the rows have is a StoreError
      naming them;
    - a put that does not fit the fields table, or leaves a row whose columns disagree in length, is
      a StoreError naming field and key; a call that raises changes nothing;
    - readers see all of a put or nothing; other fields are added, the same field is replaced.
    """

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        """Write columns, row i belonging to batch.keys[i], together with batch.tags (they replace).

        With `keep_tags` the rows must exist and keep the tags that the store has: for a writer
        whose batch may be older than the last `tag`. Do not change in place what was put.
        """
        ...

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Return these fields of these rows, in the batch's order."""
        ...

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Return keys and current tags of these rows, or of the whole partition in order of first put."""
        ...

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        ...

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Remove these rows, which must exist, or the whole partition, if it exists."""
        ...

    def size(self, partition: str | None = None) -> int:
        """Return the number of rows, in one partition or in all."""
        ...

    def save(self, path: Path, keys: Collection[Key] | None = None) -> None:
        """Write everything, or these rows alone, to a folder. Other rows may change in the meantime."""
        ...

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote."""
        ...


class StoreHandle(Protocol):
    """The address of a store on a cluster, which can be pickled to workers."""

    def connect(self, timeout_s: float, *, lasting: bool = True) -> Store:
        """Return the store for this process. What this process puts outlives it if `lasting`."""
        ...

    def actors(self) -> dict[str, Any]:
        """Return the actors without which the store is lost, by the names that errors use."""
        ...

    def close(self) -> None:
        """End the store and free its memory. Closing it again does nothing."""
        ...
