"""The Store: where tensors wait between the worker that made them and the worker that needs them."""

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
    - a missing key, a missing field, or a field that only some of the rows have is a StoreError naming them;
    - a put is seen whole or not at all; further fields are added, the same field is replaced;
    - waiting is event-driven with a deadline; the DeadlineError says what was awaited and what is missing.
    """

    def put(self, batch: BatchRef, columns: Mapping[str, Column]) -> None:
        """Write columns, row i belonging to batch.keys[i], together with batch.tags (they replace)."""
        ...

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        """Just these fields of these rows, in the batch's order."""
        ...

    def batch(self, partition: str, keys: Sequence[Key] | None = None) -> BatchRef:
        """Keys and current tags: of these rows, or of the whole partition in order of first put."""
        ...

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        """Replace the tags of rows that exist."""
        ...

    def wait(
        self, partition: str, keys: Sequence[Key], fields: Sequence[str], *, timeout: float, owner: str
    ) -> BatchRef:
        """Until every row has every field or has failed; a DeadlineError names `owner` and what lacks."""
        ...

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> None:
        """Forget these rows, or the whole partition."""
        ...

    def size(self, partition: str | None = None) -> int:
        """How many rows are held, in one partition or in all."""
        ...

    def save(self, path: Path) -> None:
        """Write everything held to a folder."""
        ...

    def load(self, path: Path) -> None:
        """Replace everything held by what `save` wrote."""
        ...
