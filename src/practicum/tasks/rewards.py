"""Judging answers: a sample gets a reward, or is named with the function that failed on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from practicum.errors import RecipeError, RecipeErrors, RewardError
from practicum.recipe.own_parts import find_function
from practicum.recipe.schema.recipe import Reward, RewardFunction, Task
from practicum.tasks.builtin import find_kind
from practicum.tasks.scorers import INLINE, SCORERS, RewardSample, exact
from practicum.tasks.user_calls import CallResult, call_each, is_async, raised
from practicum.user_code import (
    FLOAT32_MAX,
    error_line,
    finite_number,
    frames,
    place,
    repr_of,
    shorten,
    trace,
    type_name,
)

_ASYNC_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The weighted sum and each function's value; or no reward and why (reward.on_error: skip)."""

    reward: float | None
    parts: dict[str, float]
    failure: str | None = None
    trace: str | None = None
    """The traceback of a function that raised."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A reward function ready to be called, under the name it has in metrics."""

    name: str
    call: Callable[[Any], Any]
    spec: RewardFunction


class RewardFunctions:
    """Scores answers by the recipe's rewards; functions that can't be loaded are RecipeErrors.

    Sync functions of users run one call at a time in a thread, async ones side by side, batch ones
    once for all samples. A call that takes longer than its timeout is given up.
    """

    def __init__(self, tasks: Mapping[str, Task], reward: Reward) -> None:
        self._stop = reward.on_error == "stop"
        self._gates: dict[int, asyncio.Semaphore] = {}
        self._kinds = {name: task.kind for name, task in tasks.items()}
        problems: list[RecipeError] = []
        common = self._load(reward.functions, "reward.functions", problems)
        self._functions = {
            name: common
            if task.rewards is None
            else self._load(task.rewards, f"tasks.{name}.rewards", problems)
            for name, task in tasks.items()
        }
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise RecipeErrors("rewards", problems)

    def streams(self, task: str) -> bool:
        """Whether sessions of a task are judged one by one, as they finish.

        Not if a function takes a batch, nor if all are so quick that judging them together costs less.
        """
        specs = [function.spec for function in self._functions[task]]
        return self.divides(task) and not all(spec.use in INLINE for spec in specs)

    def divides(self, task: str) -> bool:
        """Whether samples of a task may be judged apart from each other; not if a function takes a batch."""
        return not any(function.spec.batch for function in self._functions[task])

    async def judge(self, sample: RewardSample) -> RewardResult:
        """One session's verdict, while others are still under way; see `score`."""
        return (await self.score([sample]))[0]

    def check(self, sample: RewardSample) -> float:
        """What the task's own checker says: of a file task, equality with its answer."""
        return float(self._check(sample))

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One Judged per sample, in order; a RewardError if one fails and the recipe says stop."""
        parts: list[dict[str, float]] = [{} for _ in samples]
        totals = [0.0] * len(samples)
        failures: list[CallResult | None] = [None] * len(samples)
        for function, rows in self._group(samples):
            outcomes = await self._call(function, [samples[i] for i in rows])
            for i, outcome in zip(rows, outcomes, strict=True):
                if outcome.failure is None:
                    parts[i][function.name] = outcome.value
                    totals[i] += function.spec.weight * outcome.value
                else:
                    sentence = f"reward {function.name} {outcome.failure}{place(outcome.error)}"
                    failures[i] = failures[i] or CallResult(failure=sentence, error=outcome.error)
        return [
            RewardResult(total, part) if failure is None else _unjudged(part, failure)
            for total, part, failure in zip(totals, parts, failures, strict=True)
        ]

    def _load(
        self, specs: Sequence[RewardFunction], path: str, problems: list[RecipeError]
    ) -> list[_Function]:
        functions: list[_Function] = []
        for n, spec in enumerate(specs):
            try:
                _check_spec(spec, f"{path}[{n}]")
                call = self._check if spec.use == "checker" else load_function(spec, f"{path}[{n}]")
            except RecipeError as problem:
                problems.append(problem)
                continue
            name = spec.use.rpartition(":")[2]
            twins = sum(f.name.partition("#")[0] == name for f in functions)
            functions.append(_Function(f"{name}#{twins + 1}" if twins else name, call, spec))
        return functions

    def _gate(self, function: _Function) -> asyncio.Semaphore:
        """A sync function is called by one thread at a time, also where sessions are judged one by one."""
        if id(function) not in self._gates:
            self._gates[id(function)] = asyncio.Semaphore(_ASYNC_AT_ONCE if is_async(function.call) else 1)
        return self._gates[id(function)]

    def _check(self, sample: RewardSample) -> float:
        """By the checker of the task's kind; of a file task, equality with its answer."""
        kind = self._kinds[sample.task]
        if kind is None:
            return exact(sample)
        return find_kind(kind, sample.task).check(sample.response_text, sample.answer, sample.row)

    def _group(self, samples: Sequence[RewardSample]) -> list[tuple[_Function, list[int]]]:
        """Each function with the samples it judges; tasks without own rewards share functions."""
        groups: dict[int, tuple[_Function, list[int]]] = {}
        for i, sample in enumerate(samples):
            for function in self._functions[sample.task]:
                groups.setdefault(id(function), (function, []))[1].append(i)
        return list(groups.values())

    async def _call(self, function: _Function, samples: list[RewardSample]) -> list[CallResult]:
        """Checked outcomes, one per sample; raises the first failure if the recipe says stop."""
        spec = function.spec
        if spec.use in INLINE:
            outcomes = [_inline(function.call, sample) for sample in samples]
        elif spec.batch:
            named = partial(_named_batch, spec.use)
            (outcome,) = await call_each(function.call, [samples], spec.timeout_s, self._stop, named)
            outcomes = _unpack(outcome, len(samples))
        else:
            async with self._gate(function):
                named = partial(_named, spec.use)
                outcomes = await call_each(function.call, samples, spec.timeout_s, self._stop, named)
        outcomes = [_checked(outcome, spec.weight) for outcome in outcomes]
        for i, outcome in enumerate(outcomes):
            if self._stop and outcome.failure is not None:
                # Not `from` its error, which may be such that nothing can write it or send it.
                raise _error(function, outcome, samples[i]) from None
        return outcomes


def _check_spec(spec: RewardFunction, path: str) -> None:
    if spec.batch and spec.use in ("checker", *SCORERS):
        hint = f"leave it out: {spec.use} takes one sample at a time."
        raise RecipeError(f"{path}.batch", "true", "false for a built-in reward", hint)


def load_function(spec: RewardFunction, path: str) -> Callable[[Any], Any]:
    """The function that `use` names (not checker); a RecipeError at `path`.use if there is none."""
    path = f"{path}.use"
    if spec.use in SCORERS:
        return SCORERS[spec.use]()
    return find_function("reward", spec.use, ("checker", *SCORERS), path)


def _unjudged(parts: dict[str, float], outcome: CallResult) -> RewardResult:
    return RewardResult(None, parts, outcome.failure, None if outcome.error is None else trace(outcome.error))


def _named(use: str, sample: RewardSample) -> str:
    return f"reward {use} of {sample.key}"


def _named_batch(use: str, samples: Sequence[RewardSample]) -> str:
    return f"reward {use} of {len(samples)} samples"


def _inline(call: Callable[[RewardSample], Any], sample: RewardSample) -> CallResult:
    try:
        return CallResult(call(sample))
    except BaseException as error:  # the checker of a user's own kind of task may raise anything
        return raised(error)


def _unpack(outcome: CallResult, count: int) -> list[CallResult]:
    """A batch function's values, one per sample; its failure is the failure of all of them."""
    if outcome.failure is None:
        try:
            values = outcome.value.tolist() if hasattr(outcome.value, "tolist") else outcome.value
            kind = next((kind for kind in (list, tuple) if issubclass(type(values), kind)), None)
            # By the type's own methods: those of a subclass may tell another length than they give.
            items = [] if kind is None else list(kind.__iter__(values))
            if kind is not None and len(items) == count:
                return [CallResult(value) for value in items]
            found = type_name(values) if kind is None else f"{len(items)} values"
        except BaseException as error:  # a hostile list, or a tensor that holds nothing
            found = f"{repr_of(outcome.value)}, which can't be read ({error_line(error)})"
        outcome = CallResult(failure=f"returned {found}, expected a list with one number for each sample")
    failure = f"{outcome.failure} (for a batch of {count} samples)"
    return [CallResult(failure=failure, error=outcome.error)] * count


def _checked(outcome: CallResult, weight: float) -> CallResult:
    """The outcome with its value as a float, or a failure if that is no number to train on."""
    if outcome.failure is not None:
        return outcome
    number = finite_number(outcome.value)
    if number is not None and abs(weight * number) <= FLOAT32_MAX:
        return CallResult(number)
    hint = " (with batch: true, a function gets a list)" if issubclass(type(outcome.value), list) else ""
    return CallResult(failure=f"returned {repr_of(outcome.value)}, expected a finite number{hint}")


def _error(function: _Function, outcome: CallResult, sample: RewardSample) -> RewardError:
    """What the user is told of a failure that stops the run: where it was raised, and on which sample."""
    lines = [f"reward {function.spec.use} {outcome.failure}"]
    if outcome.error is not None and (where := frames(outcome.error)):
        lines.append(where)
    error = RewardError(
        "\n".join(
            [
                *lines,
                f"  sample:   {sample.key}, task {sample.task}",
                f"  prompt:   {shorten(sample.prompt_text)!r}",
                f"  response: {shorten(sample.response_text)!r}",
                f"  answer:   {repr_of(sample.answer)}",
                "  → mend the function, or set reward.on_error: skip to leave such samples out.",
            ]
        )
    )
    error.details = "" if outcome.error is None else trace(outcome.error)
    return error
