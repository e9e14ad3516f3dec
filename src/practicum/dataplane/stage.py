"""The stage decorator: a method that computes columns from columns becomes a stage of the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import StoreError


class Columns(Mapping[str, Column]):
    """The columns that a stage reads. Asking for one that it did not declare is a StoreError."""

    def __init__(self, stage: str, columns: Mapping[str, Column]) -> None:
        self._stage, self._columns = stage, columns

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise StoreError(
                f"stage {self._stage!r} asked for {name!r}, which its reads do not declare: "
                f"{_names(self._columns)}"
            )
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def ragged(self, name: str) -> Ragged:
        """A column of tokens."""
        column = self[name]
        assert isinstance(column, Ragged), f"{name} is not a ragged field"
        return column

    def objects(self, name: str) -> list[Any]:
        """A column of one object for each row."""
        column = self[name]
        assert isinstance(column, list), f"{name} is not an object field"
        return column


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
            chosen = step.batch if rows is None else rows(self, step)
            batch = chosen.real()
            only_padding = not len(batch)
            if only_padding and len(chosen) and getattr(self, "parallel", None) is not None:
                batch = chosen.take([0])
            if not len(batch):
                return None
            try:
                spec = self.plan[name]
                read = self.store.get(batch, spec.reads) if spec.reads else {}
                result = method(self, batch, Columns(name, read), step)
                writes, report = result if isinstance(result, tuple) else (result, None)
                _check_writes(name, spec.writes, writes)
                if writes and not only_padding:
                    self.store.put(batch, writes, keep_tags=True)
            except Exception as error:
                error.add_note(f"in stage {name!r} on {len(batch)} rows of partition {batch.partition!r}")
                raise
            return report

        run.__dict__["stage_name"] = name
        return run

    return decorate


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
        wrong += [f"wrote {_names(extra)} besides"] if extra else []
        raise StoreError(
            f"stage {name!r} declares that it writes {_names(declared)}; it " + " and ".join(wrong)
        )


def _names(fields: Iterable[str]) -> str:
    return ", ".join(sorted(fields)) or "nothing"
