"""Run stages: `@stage` turns a role's method into a stage that receives the plan's reads."""

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
    """Argument of every stage: the batch, and other facts about the step."""

    batch: BatchRef
    """The whole batch, including padding. Each stage selects its rows."""
    number: int = 0
    """Number of the step, starting at 1, or 0 outside of training."""
    baselines: Mapping[int, float] = field(default_factory=dict)
    """Rewards of greedy sessions by prompt uid, if the advantage estimator needs them."""
    prompts: Mapping[Key, Any] = field(default_factory=dict)
    """The `Prompt` of each row, for stages that read more than fields."""


StageMethod = Callable[[Any, BatchRef, Columns, StepInfo], Any]
StageCall = Callable[[Any, StepInfo], Any]
Stages = Mapping[str, Callable[[StepInfo], Any]]
"""Stages by name. Each returns metrics, an `UpdateReport`, padding rows, or None without rows."""


def stage(
    name: str, *, rows: Callable[[Any, StepInfo], BatchRef] = lambda role, step: step.batch
) -> Callable[[StageMethod], StageCall]:
    """Turn `method(self, batch, columns, step)` into the stage `name` of `self.plan`, called as
    `method(step)`.

    Coroutine functions stay coroutine functions. `rows(self, step)` selects the rows of this rank. `columns`
    holds exactly the plan's reads, from `self.store`. The method returns exactly the plan's writes, or
    (writes, report), where `report` is returned to the caller. The writes are put into the store, and rows
    keep their tags. Padding rows are excluded, as they have all fields from the start. Without rows, the
    method is not called and the result is None. But if `self.parallel` is set, every rank must take part, so
    a rank with only padding runs the method on one padding row and discards the result. `self.recorder`
    receives the rows, the reads and writes, and the time.
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
    """One call of a stage: fetches its reads, checks and stores its writes."""

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
        return Columns(self.name, self.role.store.get(self.batch, self.spec.reads) if self.spec.reads else {})

    def write(self, result: Any) -> Any:
        writes, report = result if isinstance(result, tuple) else (result, None)
        if set(writes) != set(self.spec.writes):
            declared, wrote = (", ".join(sorted(names)) or "nothing" for names in (self.spec.writes, writes))
            raise StoreError(f"stage {self.name!r} declares the writes {declared}, but wrote {wrote}")
        if writes and not self._discards:
            self.role.store.put(self.batch, writes, keep_tags=True)
            self.role.recorder.add(self.name, self.batch, writes)
        return report


def stage_method(role: Any, name: str) -> Callable[[StepInfo], Any]:
    """Return the role's method of this stage. Coroutines run for at most `role.stage_s` seconds."""
    for attribute in dir(type(role)):
        if getattr(getattr(type(role), attribute), "stage_name", None) == name:
            method = getattr(role, attribute)
            if not inspect.iscoroutinefunction(method):
                return method
            return lambda step: run_async(method(step), timeout=role.stage_s, owner=f"stage {name}")
    raise TypeError(f"{type(role).__name__} has no method decorated with @stage({name!r})")
