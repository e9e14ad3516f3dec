"""The index of a store whose bytes are in TransferQueue: it finds chunks, and frees them when done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ray_store.index_client import IndexClient
from practicum.dataplane.ray_store.row_locations import Located, Put, RowGroup, SavedField, Snapshot
from practicum.dataplane.transferqueue.chunks import Chunk, Shipment
from practicum.dataplane.transferqueue.link import Link
from practicum.errors import StoreError


class ChunkIndex(IndexClient):
    """Calls to an index that reports what it frees. Locators that it gives are chunks, not puts."""

    def __init__(self, actor: Any, link: Link, timeout_s: float) -> None:
        super().__init__(actor, timeout_s)
        self._link = link

    def commit(self, put: Put) -> list[Any]:
        """Make a put seen; its own chunks are freed if it is refused, else those that it replaces."""
        return self._freeing([put], super().commit, put)

    def replace(self, puts: Sequence[Put]) -> list[Any]:
        """Hold what these puts make, and nothing else."""
        return self._freeing(puts, super().replace, puts)

    def clear(self, partition: str, keys: Sequence[Key] | None = None) -> list[Any]:
        """Forget rows, and the chunks of puts of which nothing is left."""
        return self._freeing((), super().clear, partition, keys)

    def locate(self, batch: BatchRef, names: Sequence[str], *, lease_s: float = 0.0) -> Located:
        """In which chunks these fields of the batch's rows are; they may be freed at any time."""
        located, places = super().locate(batch, names), _Places()
        groups = [
            RowGroup(fields, *places.of(located.locators, puts, at)) for fields, puts, at in located.groups
        ]
        return Located(places.chunks(), groups)

    def snapshot(self, *, lease_s: float = 0.0) -> Snapshot:
        """Everything that is held now."""
        snapshot, places = super().snapshot(), _Places()
        partitions = [
            partition._replace(
                fields=[
                    SavedField(name, rows, *places.of(snapshot.locators, puts, at))
                    for name, rows, puts, at in partition.fields
                ]
            )
            for partition in snapshot.partitions
        ]
        return Snapshot(places.chunks(), partitions)

    def _freeing(self, puts: Iterable[Put], call: Any, *args: object) -> list[Any]:
        try:
            freed = call(*args)
        except StoreError:
            self._free(put.locator for put in puts)
            raise
        self._free(freed)
        return []

    def _free(self, locators: Iterable[Any]) -> None:
        # A put without columns has no locator.
        shipments = [locator for locator in locators if locator is not None]
        names = [chunk.name for shipment in shipments for chunk in shipment.chunks()]
        self._link.clear(names, self._timeout_s)

    def _call(self, method: str, *args: object, **how: Any) -> Any:
        self._link.check()
        return super()._call(method, *args, **how)


class _Places:
    """Numbers the chunks that rows lie in."""

    def __init__(self) -> None:
        self._number: dict[Chunk, int] = {}

    def of(
        self, locators: Sequence[Shipment], puts: Sequence[int], at: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """For each row the number of its chunk, and its row there."""
        numbers: list[int] = []
        rows: list[int] = []
        for put, row in zip(puts, at, strict=True):
            chunk, there = locators[put].place(row)
            numbers.append(self._number.setdefault(chunk, len(self._number)))
            rows.append(there)
        return numbers, rows

    def chunks(self) -> list[Chunk]:
        """By number."""
        return list(self._number)
