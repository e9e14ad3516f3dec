"""Ways to move columns from one actor to another; each is timed inside the actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.rows import FORMS, Arrays, Shape, TensorDicts, make_columns
from benchmarks.ways import BARE, LEARNER, PLAIN
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Ragged

DEADLINE_S = 120.0


class StoreRoute:
    """One of practicum's stores."""

    def __init__(self, handle: Any, *, lasting: bool) -> None:
        self._store = handle.connect(DEADLINE_S, lasting=lasting)

    def put(self, batch: BatchRef, columns: Mapping[str, Ragged]) -> Any:
        self._store.put(batch, columns)

    def get(self, batch: BatchRef, names: list[str], given: Any) -> dict[str, Ragged]:
        return self._store.get(batch, names)

    def clear(self, batch: BatchRef) -> None:
        self._store.clear(batch.partition)


class PlainRoute:
    """TransferQueue as its users call it: a TensorDict of jagged nested tensors, keys as strings."""

    def __init__(self) -> None:
        import transfer_queue

        self._tq = transfer_queue
        transfer_queue.init()

    def put(self, batch: BatchRef, columns: Mapping[str, Ragged]) -> Any:
        tensors = TensorDicts.wrap(columns)
        tags = [{"domain": t.domain, "response_tokens": t.response_tokens} for t in batch.tags]
        self._tq.kv_batch_put(_names(batch), batch.partition, tensors, tags)

    def get(self, batch: BatchRef, names: list[str], given: Any) -> dict[str, Ragged]:
        found: TensorDict = self._tq.kv_batch_get(_names(batch), batch.partition, names)
        return {name: Ragged.from_rows(found[name].unbind()) for name in names}

    def clear(self, batch: BatchRef) -> None:
        self._tq.kv_clear(_names(batch), batch.partition)


class BareRoute:
    """Packed arrays in Ray's object store; the reference is handed over by whoever calls the two."""

    def put(self, batch: BatchRef, columns: Mapping[str, Ragged]) -> Any:
        return [ray.put(Arrays.wrap(columns))]  # in a list, because Ray would resolve a bare reference

    def get(self, batch: BatchRef, names: list[str], given: Any) -> dict[str, Ragged]:
        return Arrays.unwrap(ray.get(given[0]))

    def clear(self, batch: BatchRef) -> None:
        """Dropped references are enough."""


def start_plain() -> Callable[[], None]:
    """Start TransferQueue with one storage unit; returns what stops it."""
    import transfer_queue

    backend = {"SimpleStorage": {"num_data_storage_units": 1}}
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
    return transfer_queue.close


class Mover:
    """An actor that writes or reads. It has a client of everything, and the same columns as the other."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._routes: dict[str, Any] = {
            name: StoreRoute(handle, lasting=name != LEARNER) for name, handle in handles.items()
        }
        self._routes |= {PLAIN: PlainRoute(), BARE: BareRoute()}

    def prepare(self, shape: Shape) -> int:
        """Make the columns that are moved from now on; gives their bytes."""
        self._columns = make_columns(shape)
        self._copy: dict[str, torch.Tensor] = {}
        return sum(column.values.nbytes for column in self._columns.values())

    def put(self, route: str, batch: BatchRef) -> tuple[float, Any]:
        """Seconds, and what the reader is to be given."""
        columns = {n: Ragged.packed(c.values, c.lengths) for n, c in self._columns.items()}
        began = time.perf_counter()
        given = self._routes[route].put(batch, columns)
        return time.perf_counter() - began, given

    def get(self, route: str, batch: BatchRef, given: Any, check: bool) -> float:
        """Seconds until all columns are there as packed tensors, which may be views."""
        began = time.perf_counter()
        found = self._routes[route].get(batch, list(self._columns), given)
        _values(found)
        seconds = time.perf_counter() - began
        if check:
            require_same(route, self._columns, found)
        return seconds

    def clear(self, route: str, batch: BatchRef) -> None:
        self._routes[route].clear(batch)

    def give(self, form: str) -> Any:
        """All columns, to whoever called."""
        return FORMS[form].wrap(self._columns)

    def take(self, form: str, sent: Any, check: bool) -> None:
        """Columns from whoever called."""
        found = FORMS[form].unwrap(sent)
        _values(found)
        if check:
            require_same(form, self._columns, found)

    def memcpy(self) -> float:
        """Seconds to copy all columns once, into memory that was used before."""
        values = {name: column.values for name, column in self._columns.items()}
        self._copy = self._copy or {name: torch.empty_like(value) for name, value in values.items()}
        began = time.perf_counter()
        for name, value in values.items():
            self._copy[name].copy_(value)
        return time.perf_counter() - began

    def nothing(self) -> None:
        """What a call costs by itself."""


def require_same(way: str, columns: Mapping[str, Ragged], found: Mapping[str, Ragged]) -> None:
    """A ValueError if something else arrived than was sent."""
    for name, column in columns.items():
        got = found[name]
        if got.lengths != column.lengths or not torch.equal(got.values, column.values):
            raise ValueError(f"{way} brought other values of {name}")


def _values(columns: Mapping[str, Ragged]) -> None:
    for column in columns.values():
        _ = column.values


def _names(batch: BatchRef) -> list[str]:
    return [f"{batch.partition}_{key.prompt}" for key in batch.keys]
