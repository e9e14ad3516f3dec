"""Dispatch work to the least loaded worker, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from practicum.errors import EngineError, TeacherError

W = TypeVar("W")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Slot(Generic[W]):
    worker: W
    works: int = 0
    load: float = 0.0
    total_load: float = 0.0
    """Total load so far, which breaks ties between equally busy workers."""

    @contextmanager
    def busy(self, load: float) -> Iterator[W]:
        """Count a piece of work inside the context."""
        self.works, self.load, self.total_load = self.works + 1, self.load + load, self.total_load + load
        try:
            yield self.worker
        finally:
            self.works -= 1
            self.load = self.load - load if self.works else 0.0  # sums of floats may not return to zero


class Dispatcher(Generic[W]):
    """Identical workers for the coroutines of an event loop."""

    def __init__(self, workers: Iterable[W]) -> None:
        self.slots = [Slot(worker) for worker in workers]

    def least_loaded(self, usable: Callable[[W], bool] = lambda _: True) -> Slot[W]:
        """Return the slot of the usable worker with the least load."""
        return min((s for s in self.slots if usable(s.worker)), key=lambda s: (s.load, s.total_load))

    async def run(
        self,
        work: Callable[[W], Awaitable[T]],
        *,
        load: float,
        deadline_s: float | None,
        abort: Callable[[W, str], None],
        names: tuple[str, str, str],
    ) -> T:
        """Run work on the least loaded worker. If it misses the deadline, abort it and raise TeacherError.
        `names` holds the names of the model, the work, and the deadline's key."""
        who, about, key = names
        with self.least_loaded().busy(load) as worker:
            try:
                async with asyncio.timeout(deadline_s):
                    return await work(worker)
            except TimeoutError:
                why = f"did not answer for {about} within {deadline_s:g} s"
                abort(worker, f"it {why}")
                raise TeacherError(f"{who} {why}; if it is only slow, raise {key}") from None
            except EngineError as error:
                raise TeacherError(f"{who} failed in {about}: {error}") from error
