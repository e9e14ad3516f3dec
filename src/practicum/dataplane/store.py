"""The Store: where tensors are between the worker that made them and the one that needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

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
        """These fields of these rows, in the batch's order."""
        ...

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags: of these rows, or of the whole partition in order of first put.

        A partition without rows is an empty batch.
        """
        ...

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        ...

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget these rows, all of which must exist, or the whole partition, if it is there."""
        ...

    def size(self, partition: str | None = None) -> int:
        """How many rows there are, in one partition or in all."""
        ...

    def save(self, path: Path) -> None:
        """Write everything to a folder."""
        ...

    def load(self, path: Path) -> None:
        """Replace everything by what `save` wrote."""
        ...
