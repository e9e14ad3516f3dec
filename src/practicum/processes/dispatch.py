"""Least-loaded dispatch: work goes to the worker that has the least of it, within a deadline."""

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
    """All load it ever got: of two that are equally busy, the one with less is next."""

    @contextmanager
    def busy(self, load: float) -> Iterator[W]:
        """Count a piece of work from here to the end of the block."""
        self.works, self.load, self.total_load = self.works + 1, self.load + load, self.total_load + load
        try:
            yield self.worker
        finally:
            self.works -= 1
            self.load = self.load - load if self.works else 0.0  # sums of fractions may not return to zero


class Dispatcher(Generic[W]):
    """Identical workers, for the coroutines of one event loop."""

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
        """Do a piece of work on the least loaded worker; one that is late is aborted, a TeacherError.

        `names` are those of the model, of the work, and of the deadline's key.
        """
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
