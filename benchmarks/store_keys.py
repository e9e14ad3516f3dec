"""What a row costs in put, get, tags and clear while a store holds 1,000, 10,000 and 100,000 rows.

Rows are small, so that the keys count and not the bytes. 1,000 new rows are put, read, looked up, tagged and
cleared again and again beside those that are held.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from benchmarks import harness
from benchmarks.clusters import cluster, wants_quick
from benchmarks.harness import Measured
from benchmarks.rows import make_batch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.ray_store.ray_store import start_ray_store
from practicum.dataplane.store import Store
from practicum.dataplane.transferqueue.transferqueue_store import start_transferqueue

HELD = (1_000, 10_000, 100_000)
SLICE = 1_000
"""Rows of one call."""
TOKENS = 4
ROUNDS, REPEATS = 5, 5
OPERATIONS = ("put", "get", "tags", "tag", "clear")
GOAL = 2.0
"""Most that a row may cost at any number of keys, in parts of what it costs at the fewest."""
PARTITION = "train"


class MemoryHandle:
    """The memory store, in the process that connects."""

    def connect(self, timeout_s: float) -> Store:
        return MemoryStore()

    def close(self) -> None:
        """It ends with its process."""


STARTERS: dict[str, Callable[[], Any]] = {
    "memory": MemoryHandle,
    "ray": start_ray_store,
    "transferqueue": start_transferqueue,
}


def columns_of(rows: int) -> dict[str, Column]:
    """A scalar and a few tokens for each row."""
    values = Ragged.packed(torch.zeros(rows * TOKENS), [TOKENS] * rows)
    return {"reward": torch.zeros(rows), "values": values}


def fill(store: Store, held: int) -> None:
    """Put rows in slices until there are so many."""
    for first in range(0, held, SLICE):
        rows = min(SLICE, held - first)
        store.put(make_batch(PARTITION, [TOKENS] * rows, first), columns_of(rows))


def live(store: Store, batch: BatchRef) -> Measured:
    """The life of these new rows: seconds of each operation for a row."""
    columns = columns_of(len(batch))
    tags = {key: replace(tag, reward=1.0) for key, tag in batch}
    works: dict[str, Callable[[], Any]] = {
        "put": lambda: store.put(batch, columns),
        "get": lambda: store.get(batch, ["reward", "values"]),
        "tags": lambda: store.batch(PARTITION, batch.keys),
        "tag": lambda: store.tag(PARTITION, tags),
        "clear": lambda: store.clear(PARTITION, batch.keys),
    }
    spent = {}
    for name, work in works.items():
        began = time.perf_counter()
        work()
        spent[name] = (time.perf_counter() - began) / len(batch)
    return spent


class Holder:
    """An actor with a client of one store."""

    def __init__(self, handle: Any) -> None:
        torch.set_num_threads(1)
        self._store: Store = handle.connect(120.0)

    def measure(self, held: int, repeats: int) -> Measured:
        """Medians over the lives of new rows beside so many others; leaves the store empty."""
        fill(self._store, held)
        new = make_batch(PARTITION, [TOKENS] * SLICE, held)
        live(self._store, new)
        lives = [live(self._store, new) for _ in range(repeats)]
        self._store.clear(PARTITION)
        left = self._store.size()
        assert not left, f"{left} rows are left"
        return {name: statistics.median(one[name] for one in lives) for name in OPERATIONS}


def measure(rounds: int, held: Sequence[int], repeats: int) -> dict[str, dict[str, list[Measured]]]:
    """Seconds of each operation for a row, by store and by rows held, in each round."""
    found: dict[str, dict[str, list[Measured]]] = {}
    with cluster(cpus=6, object_store_gb=1.0):
        actor: Any = ray.remote(num_cpus=1)(Holder)
        for name, start in STARTERS.items():
            handle = start()
            holder = actor.remote(handle)
            by_size: dict[str, list[Measured]] = {str(size): [] for size in held}
            for number in range(rounds):
                for size in held if number % 2 else reversed(held):
                    by_size[str(size)].append(ray.get(holder.measure.remote(size, repeats)))
            found[name] = by_size
            ray.kill(holder)
            handle.close()
            for size, rows in by_size.items():
                told = [f"{op} {1e6 * harness.medians(rows)[op]:.2f}" for op in OPERATIONS]
                print(f"  {name}, {int(size):,} rows held, µs per row: {', '.join(told)}", flush=True)
    return found


def main() -> None:
    """Measure all stores, and write the results."""
    print(f"cost of a row in calls of {SLICE:,} rows")
    if wants_quick():
        measure(1, (1_000, 3_000), 2)
        return
    found = measure(ROUNDS, HELD, REPEATS)
    settings = {"slice": SLICE, "tokens": TOKENS, "rounds": ROUNDS, "repeats": REPEATS}
    harness.write_results("store_keys", {"goal": GOAL, "settings": settings, "stores": found})


if __name__ == "__main__":
    main()
