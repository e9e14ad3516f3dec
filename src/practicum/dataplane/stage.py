"""The stage decorator: a method that computes columns from columns becomes a stage of the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.store import Store
from practicum.errors import StoreError

if TYPE_CHECKING:
    from practicum.dataplane.plan import Plan


class Staged(Protocol):
    """What an object with stages has: where columns live, and who reads and writes which."""

    @property
    def store(self) -> Store: ...

    @property
    def plan(self) -> Plan: ...


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


P = ParamSpec("P")
S = TypeVar("S", bound=Staged)
T = TypeVar("T")


class _Decorator(Protocol):
    @overload
    def __call__(
        self, method: Callable[Concatenate[S, BatchRef, Columns, P], tuple[Mapping[str, Any], T]], /
    ) -> Callable[Concatenate[S, BatchRef, P], T | None]: ...

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, BatchRef, Columns, P], Mapping[str, Any]], /
    ) -> Callable[Concatenate[S, BatchRef, P], None]: ...


def stage(name: str) -> _Decorator:
    """Make `method(self, batch, columns, ...)` the stage `name` of `self.plan`.

    It is called without `columns`: they are exactly the plan's reads, from `self.store`. It returns
    exactly the plan's writes, or (writes, value) to return `value` to the caller; they are put, and
    the rows keep their tags. Padding rows never reach it: they have every field from the start. An empty
    batch is not computed: the call returns None. Only if `self.parallel` is there and not None, the method
    must run on every rank: one that has padding alone computes a row of it, and nothing is written.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):
            raise TypeError(f"stage {name!r} is a coroutine function; a stage is a plain method")

        @wraps(method)
        def run(self: Staged, batch: BatchRef, *args: Any, **kwargs: Any) -> Any:
            batch, given = batch.real(), batch
            idle = not len(batch)
            if idle and len(given) and getattr(self, "parallel", None) is not None:
                batch = given.take([0])
            if not len(batch):
                return None
            try:
                spec = self.plan[name]
                columns = Columns(name, self.store.get(batch, spec.reads))
                result = method(self, batch, columns, *args, **kwargs)
                written, value = result if isinstance(result, tuple) else (result, None)
                _check_writes(name, spec.writes, written)
                if not idle:
                    self.store.put(batch, written, keep_tags=True)
            except Exception as error:
                error.add_note(f"in stage {name!r} on {len(batch)} rows of partition {batch.partition!r}")
                raise
            return value

        run.__dict__["stage_name"] = name
        return run

    return decorate


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
