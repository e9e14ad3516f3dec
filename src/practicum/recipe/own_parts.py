"""Find parts that a recipe names: built in, registered by a package, or custom as package.module:name.

`find_part` finds all of them, in every process. Built-in parts are in the registries of higher layers. A
package registers a name with an entry point of the group `practicum.<kind>`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import entry_points
from typing import Any, TypeVar

from practicum.errors import PracticumError, RecipeError
from practicum.recipe.user_functions import import_function, import_object, meant, not_imported
from practicum.user_code import error_line, frames, trace

T = TypeVar("T")
GUIDE = "docs/extend.md has an example"


@dataclass(frozen=True, slots=True)
class PartKind:
    """A kind of part. One without `takes` is an object made by a constructor or decorator."""

    key: str
    about: str
    takes: tuple[str, ...] | None
    gives: str

    @property
    def expected(self) -> str:
        if self.takes is None:
            return f"{self.about}: {self.gives}"
        return f"{self.about}: a function of ({', '.join(self.takes)}) that returns {self.gives}"


PARTS: dict[str, PartKind] = {
    "advantage": PartKind("algorithm.advantage", "an advantage estimator", ("inputs",), "an AdvantageResult"),
    "policy_loss": PartKind("algorithm.loss", "a policy loss", ("inputs",), "PolicyTerms"),
    "aggregation": PartKind(
        "algorithm.aggregation", "an aggregation", ("tokens_S", "whole_S"), "the divisor of each session [S]"
    ),
    "kl_estimator": PartKind(
        "algorithm.kl.estimator", "a KL estimator", ("log_ratio_N",), "the estimate of each token [N]"
    ),
    "sampled_divergence": PartKind(
        "distill.divergence", "a divergence of sampled tokens", ("log_ratio_N",), "a number per token [N]"
    ),
    "divergence": PartKind(
        "distill.divergence", "a divergence of distributions", ("buckets",), "BucketTerms"
    ),
    "schedule": PartKind(
        "train.schedule", "a learning-rate schedule", ("step", "train"), "the learning rate"
    ),
    "optimizer": PartKind(
        "train.optimizer", "an optimizer", ("parameters", "train"), "a torch.optim.Optimizer"
    ),
    "task_kind": PartKind("tasks.<name>.kind", "a kind of task", None, "a Procedural"),
    "check": PartKind(
        "checks.own", "a check", ("metrics", "batch"), "a message if something is wrong, else None"
    ),
    "tracker": PartKind(
        "track.to", "a tracker", ("recipe", "folder"), "an object with log(step, metrics) and close()"
    ),
    "stage": PartKind("stages", "a stage", None, "a function decorated with @stage(after=…)"),
    "reward": PartKind("reward.functions", "a reward function", ("sample",), "a number"),
    "loop": PartKind("agent.loop", "a loop", ("session",), "nothing, as a coroutine function"),
    "tool": PartKind("agent.tools", "a tool", ("arguments",), "the result for the model"),
}
"""Kinds by the last word of their group of entry points."""
_found: dict[tuple[str, str, str], Any] = {}
"""Cache of parts by kind, name and working directory."""


def find_part(
    kind: str, name: str, builtin: Mapping[str, T] | None = None, *, path: str = "", of: type[T] | None = None
) -> T:
    """Return the part of this kind and name, or raise a RecipeError at `path` or the kind's key.

    The signature of a function is checked, and its exceptions become PracticumErrors with the user's frames.
    An object must be an instance of `of`.
    """
    known: Mapping[str, T] = builtin or {}
    if name in known:
        return known[name]
    place = kind, name, os.getcwd()
    if place not in _found:
        path = path or PARTS[kind].key
        part = import_object(name, path) if ":" in name else _registered(kind, name, known, path)
        _found[place] = _checked(PARTS[kind], part, name, path, of)
    return _found[place]


def find_function(kind: str, name: str, known: Iterable[str], path: str) -> Callable[..., Any]:
    """Return a custom function, not one of the `known`, without a check of its signature or calls."""
    return import_function(name, path) if ":" in name else _registered(kind, name, known, path)


def registered_names(key: str | None = None) -> set[str]:
    """Return the names that installed packages register, for one key of the recipe or all."""
    kinds = [kind for kind, part in PARTS.items() if key in (None, part.key)]
    return {name for kind in kinds for name in entry_points(group=f"practicum.{kind}").names}


def guarded(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap a user's function so that its exceptions are PracticumErrors with the user's frames."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with users_errors(what):
            return function(*args, **options)

    return call


@contextmanager
def users_errors(what: str, kind: type[PracticumError] = PracticumError) -> Iterator[None]:
    """Turn exceptions of a user's code, including SystemExit, into errors of this kind with the user's
    frames.

    KeyboardInterrupt passes through.
    """
    try:
        yield
    except (PracticumError, KeyboardInterrupt):
        raise
    except BaseException as error:
        named_error = kind(f"{what} raised {error_line(error)}\n{frames(error)}".rstrip())
        named_error.details = trace(error)
        raise named_error from None


def short_name(name: str) -> str:
    """Return the name without its module, for metrics and stages."""
    return name.rpartition(":")[2]


def _registered(kind: str, name: str, known: Iterable[str], path: str) -> Any:
    """Return the object that an installed package registers under this name."""
    offered = entry_points(group=f"practicum.{kind}")
    entries = {entry.value: entry for entry in offered if entry.name == name}
    if not entries:
        names = [*known, *sorted(offered.names)]
        listed = f"one of {', '.join(names)}, or " if names else ""
        what = "name" if PARTS[kind].takes is None else "function"
        raise RecipeError(path, repr(name), f"{listed}package.module:{what}", meant(name, names))
    if len(entries) > 1:
        found = f"{name!r}, which is registered as {' and as '.join(entries)}"
        raise RecipeError(path, found, "a name of one package", f"use the full name: {next(iter(entries))}")
    ((value, entry),) = entries.items()
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise not_imported(error, value, name, path) from None


def _checked(kind: PartKind, part: Any, name: str, path: str, of: type | None) -> Any:
    """Return the part if it fits its kind, else raise a RecipeError."""
    if not (callable(part) if kind.takes is not None else isinstance(part, of or object)):
        raise RecipeError(path, f"{name!r} of type {type(part).__name__}", kind.expected, GUIDE)
    if kind.takes is None:
        return part
    if inspect.iscoroutinefunction(part):
        raise RecipeError(path, f"{name!r}, an async function", kind.expected, "declare it without async")
    with suppress(TypeError, ValueError):  # some functions written in C have no signature
        signature = inspect.signature(part)
        try:
            signature.bind(*kind.takes)
        except TypeError as error:
            found = f"{name!r}, which takes {signature}"
            raise RecipeError(path, found, kind.expected, f"{error}; {GUIDE}") from None
    return guarded(part, f"{path}: {name}")
