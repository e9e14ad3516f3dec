"""What every worker has: the recipe, the store, torch's threads, and sentences for the controller."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Protocol

from practicum.concurrency.event_loop import blocked_by
from practicum.dataplane.store import Store
from practicum.recipe.schema.recipe import Recipe
from practicum.records.record_files import RecordPlace
from practicum.records.recorder import Recorder
from practicum.records.recording_store import RecordingStore
from practicum.roles.train_rank import set_threads
from practicum.runtime.random_state import seed_generators
from practicum.runtime.ray.init_ray import enter_folder


class StoreHandle(Protocol):
    """How a process comes to the store: it pickles, and travels to every worker."""

    def connect(self, timeout_s: float, *, lasting: bool = True) -> Store:
        """A client for this process; what it puts outlasts it, if `lasting`."""
        ...

    def actors(self) -> dict[str, Any]:
        """The store's own actors, by names for people."""
        ...

    def close(self) -> None:
        """Stop the store's actors."""
        ...


@dataclass(frozen=True, slots=True)
class RecordingHandle:
    """A handle of a store for a worker that records what goes through it."""

    handle: StoreHandle
    place: RecordPlace

    def connect(self, timeout_s: float, *, lasting: bool = True) -> Store:
        return RecordingStore(self.handle.connect(timeout_s, lasting=lasting), Recorder(self.place))

    def actors(self) -> dict[str, Any]:
        return self.handle.actors()

    def close(self) -> None:
        self.handle.close()


@dataclass(frozen=True, slots=True)
class RankReply:
    """What a call of a rank gives: its value, and what the checks reported meanwhile."""

    value: Any = None
    sentences: tuple[str, ...] = ()
    fired: dict[str, int] = field(default_factory=dict)


class Worker:
    """The base of all workers. What may fail is in `begin`: of an error in __init__ Ray keeps words only."""

    LASTING = True
    """Whether the run continues without this process, with what it wrote."""

    def __init__(self, recipe: Recipe, handle: StoreHandle, threads: int | None = None) -> None:
        enter_folder()
        # What users' code draws by itself is the same in every run, as long as nobody dies.
        seed_generators(recipe.seed)
        set_threads(threads or worker_threads(recipe))
        self.recipe = recipe
        self.store = handle.connect(recipe.runtime.store_s, lasting=self.LASTING)

    def blocked(self) -> str | None:
        """Who keeps the process's event loop from its work, if it does not answer."""
        return blocked_by()

    def pid(self) -> int:
        """The process's id on its machine."""
        return os.getpid()


def worker_threads(recipe: Recipe) -> int:
    """torch's threads: the recipe's, else the machine's cores shared among the train pool's devices there."""
    return recipe.runtime.threads or max(1, (os.cpu_count() or 1) // recipe.pools.train.devices)
