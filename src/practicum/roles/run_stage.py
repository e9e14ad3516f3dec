"""How a stage is run: `@stage` makes a method of a role one, which gets what the plan says that it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Self

from practicum.concurrency.event_loop import run_async
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Columns
from practicum.errors import StoreError


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What every stage is called with: the batch, and what the step knows beside it."""

    batch: BatchRef
    """The whole batch, padding included; each stage takes its own rows of it."""
    number: int = 0
    """Number of the step, from 1 on; 0 outside of training."""
    baselines: Mapping[int, float] = field(default_factory=dict)
    """Rewards of greedy sessions by their prompt's uid, if the advantage estimator needs them."""
    prompts: Mapping[Key, Any] = field(default_factory=dict)
    """The `Prompt` of each row, for stages that read more than tokens."""


StageMethod = Callable[[Any, BatchRef, Columns, StepInfo], Any]
StageCall = Callable[[Any, StepInfo], Any]
Stages = Mapping[str, Callable[[StepInfo], Any]]
"""Stages by name. Each returns metrics, an `UpdateReport`, padding rows, or None if it had no row."""


def stage(
    name: str, *, rows: Callable[[Any, StepInfo], BatchRef] = lambda role, step: step.batch
) -> Callable[[StageMethod], StageCall]:
    """Make `method(self, batch, columns, step)` the stage `name` of `self.plan`, called as `method(step)`.

    A coroutine function becomes one that is awaited. `rows(self, step)` picks the rows of this rank.
    `columns` are exactly the plan's reads, from `self.store`. The method
    returns exactly the plan's writes, or (writes, report) to return `report` to the caller; they are put, and
    the rows keep their tags. Padding rows never reach it: they have every field from the start. Without a row
    it is not called: the call returns None. But if `self.parallel` is set, every rank must take part: a rank
    that has only padding runs the method on one padding row and discards the result. `self.recorder` receives
    the rows, what was read and written, and the time.
    """

    def decorate(method: StageMethod) -> StageCall:
        @wraps(method)
        def run(self: Any, step: StepInfo) -> Any:
            with _StageRun(self, name, step, rows(self, step)) as stage_run:
                if stage_run.batch:
                    return stage_run.write(method(self, stage_run.batch, stage_run.columns(), step))

        @wraps(method)
        async def run_coroutine(self: Any, step: StepInfo) -> Any:
            with _StageRun(self, name, step, rows(self, step)) as stage_run:
                if stage_run.batch:
                    return stage_run.write(await method(self, stage_run.batch, stage_run.columns(), step))

        call = run_coroutine if inspect.iscoroutinefunction(method) else run
        call.__dict__["stage_name"] = name
        return call

    return decorate


class _StageRun:
    """One run of a stage: fetches what it reads, checks and puts what it writes."""

    def __init__(self, role: Any, name: str, step: StepInfo, chosen: BatchRef) -> None:
        self.role, self.name, self.spec = role, name, role.plan[name]
        self.batch, self._discards = chosen.real(), False
        if not self.batch and chosen and getattr(role, "parallel", None) is not None:
            self.batch, self._discards = chosen.take([0]), True
        self._span = role.recorder.span(name, step.number, rows=len(step.batch))

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: Any) -> None:
        if isinstance(error, Exception):
            where = f"{len(self.batch)} rows of partition {self.batch.partition!r}"
            error.add_note(f"in stage {self.name!r} on {where}")
        self._span.__exit__(kind, error, at)

    def columns(self) -> Columns:
        read = self.role.store.get(self.batch, self.spec.reads) if self.spec.reads else {}
        return Columns(self.name, read)

    def write(self, result: Any) -> Any:
        writes, report = result if isinstance(result, tuple) else (result, None)
        if set(writes) != set(self.spec.writes):
            declared, wrote = (", ".join(sorted(names)) or "nothing" for names in (self.spec.writes, writes))
            raise StoreError(f"stage {self.name!r} declares that it writes {declared}; it wrote {wrote}")
        if writes and not self._discards:
            self.role.store.put(self.batch, writes, keep_tags=True)
            self.role.recorder.add(self.name, self.batch, writes)
        return report


def stage_method(role: Any, name: str) -> Callable[[StepInfo], Any]:
    """Return the method of a role that is decorated as this stage.

    One that is a coroutine runs on the process's event loop, for at most `role.stage_s` seconds.
    """
    for attribute in dir(type(role)):
        if getattr(getattr(type(role), attribute), "stage_name", None) == name:
            method = getattr(role, attribute)
            if not inspect.iscoroutinefunction(method):
                return method
            return lambda step: run_async(method(step), timeout=role.stage_s, owner=f"stage {name}")
    raise TypeError(f"{type(role).__name__} has no method that is decorated with @stage({name!r})")
