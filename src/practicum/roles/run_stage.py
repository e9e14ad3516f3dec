"""How a stage is run: `@stage` makes a method of a role one, which gets what the plan says that it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Columns
from practicum.errors import StoreError
from practicum.records.recording_store import stage_span


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


def stage(
    name: str, *, rows: Callable[[Any, StepInfo], BatchRef] | None = None
) -> Callable[[StageMethod], StageCall]:
    """Make `method(self, batch, columns, step)` the stage `name` of `self.plan`, called as `method(step)`.

    `rows(self, step)` picks the rows of this rank; without it they are all of `step.batch`. `columns` are
    exactly the plan's reads, from `self.store`. The method returns exactly the plan's writes, or (writes,
    report) to return `report` to the caller; they are put, and the rows keep their tags. Padding rows never
    reach it: they have every field from the start. Without a row it is not called: the call returns None. But
    if `self.parallel` is set, every rank must take part: a rank that has only padding runs the method on one
    padding row and discards the result.
    """

    def decorate(method: StageMethod) -> StageCall:
        if inspect.iscoroutinefunction(method):
            raise TypeError(f"stage {name!r} is a coroutine function; a stage is a plain method")

        @wraps(method)
        def run(self: Any, step: StepInfo) -> Any:
            with stage_span(self.store, name, step.number, rows=len(step.batch)):
                return _run(self, name, method, step, step.batch if rows is None else rows(self, step))

        run.__dict__["stage_name"] = name
        return run

    return decorate


def _run(role: Any, name: str, method: StageMethod, step: StepInfo, chosen: BatchRef) -> Any:
    """Run a stage on the chosen rows: what it reads is fetched, what it writes is checked and put."""
    batch = chosen.real()
    only_padding = not len(batch)
    if only_padding and len(chosen) and getattr(role, "parallel", None) is not None:
        batch = chosen.take([0])
    if not len(batch):
        return None
    try:
        spec = role.plan[name]
        read = role.store.get(batch, spec.reads) if spec.reads else {}
        result = method(role, batch, Columns(name, read), step)
        writes, report = result if isinstance(result, tuple) else (result, None)
        _check_writes(name, spec.writes, writes)
        if writes and not only_padding:
            role.store.put(batch, writes, keep_tags=True)
    except Exception as error:
        error.add_note(f"in stage {name!r} on {len(batch)} rows of partition {batch.partition!r}")
        raise
    return report


def stage_method(role: object, name: str) -> Callable[[StepInfo], Any]:
    """The method of a role that is decorated as this stage."""
    for attribute in dir(type(role)):
        if getattr(getattr(type(role), attribute), "stage_name", None) == name:
            return getattr(role, attribute)
    raise TypeError(f"{type(role).__name__} has no method that is decorated with @stage({name!r})")


def _check_writes(name: str, declared: Iterable[str], written: Mapping[str, Column]) -> None:
    missing, extra = set(declared) - set(written), set(written) - set(declared)
    if missing or extra:
        wrong = [f"did not write {_names(missing)}"] if missing else []
        wrong += [f"also wrote {_names(extra)}"] if extra else []
        raise StoreError(
            f"stage {name!r} declares that it writes {_names(declared)}; it " + " and ".join(wrong)
        )


def _names(fields: Iterable[str]) -> str:
    return ", ".join(sorted(fields)) or "nothing"
