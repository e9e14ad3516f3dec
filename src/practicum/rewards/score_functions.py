"""Score responses with reward functions. Each sample gets a reward, or the failure of a function."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from practicum.concurrency.user_calls import CallResult, call_each, is_async, raised
from practicum.errors import MissingExtraError, RecipeError, RecipeErrors, RewardError
from practicum.recipe.own_parts import find_function
from practicum.recipe.reward_traits import REWARDS, is_instant
from practicum.recipe.schema.recipe import Reward, RewardFunction, Task
from practicum.rewards import reward_functions
from practicum.rewards.reward_functions import RewardSample, exact
from practicum.tasks.builtin import find_kind
from practicum.user_code import FLOAT32_MAX, finite_number, frames, raised_at, short_repr, shorten, trace

_ASYNC_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The weighted sum and each function's value, or the reason for no reward (reward.on_error: skip)."""

    reward: float | None
    parts: dict[str, float]
    failure: str | None = None
    trace: str | None = None
    """Traceback of a function that raised."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A reward function with its name in metrics. A sync one is called by one thread at a time."""

    name: str
    call: Callable[[Any], Any]
    spec: RewardFunction
    gate: asyncio.Semaphore


class RewardFunctions:
    """Scores responses with the recipe's rewards. Raises RecipeError for functions that can't be loaded.

    Custom sync functions run one call at a time in a thread, async ones concurrently, and batch ones once for
    all samples. A call that exceeds its timeout is abandoned.
    """

    def __init__(self, tasks: Mapping[str, Task], reward: Reward) -> None:
        self._stop = reward.on_error == "stop"
        self._kinds = {name: task.kind for name, task in tasks.items()}
        problems: list[RecipeError] = []
        common = self._load(reward.functions, "reward.functions", problems)
        self._functions = {
            name: common
            if task.rewards is None
            else self._load(task.rewards, f"tasks.{name}.rewards", problems)
            for name, task in tasks.items()
        }
        if problems:
            raise problems[0] if len(problems) == 1 else RecipeErrors("rewards", problems)

    def streams(self, task: str) -> bool:
        """Return True if sessions of a task are scored as they finish: slow functions without a batch."""
        return self.divides(task) and not all(is_instant(f.spec.use) for f in self._functions[task])

    def divides(self, task: str) -> bool:
        """Return True if no function of this task takes a batch, so that samples may be scored separately."""
        return not any(function.spec.batch for function in self._functions[task])

    def check(self, sample: RewardSample) -> float:
        """Return the score of the task's checker, which for a file task is equality with the answer."""
        kind = self._kinds[sample.task]
        if kind is None:
            return exact(sample)
        return find_kind(kind, sample.task).check(sample.response_text, sample.answer, sample.row)

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Return a result per sample, in order. If reward.on_error is stop, a failure is a RewardError."""
        parts: list[dict[str, float]] = [{} for _ in samples]
        totals = [0.0] * len(samples)
        failures: list[CallResult | None] = [None] * len(samples)
        groups: dict[int, tuple[_Function, list[int]]] = {}  # tasks without rewards share functions
        for i, sample in enumerate(samples):
            for function in self._functions[sample.task]:
                groups.setdefault(id(function), (function, []))[1].append(i)
        for function, rows in groups.values():
            outcomes = await self._call(function, [samples[i] for i in rows])
            for i, outcome in zip(rows, outcomes, strict=True):
                if outcome.failure is None:
                    parts[i][function.name] = outcome.value
                    totals[i] += function.spec.weight * outcome.value
                else:
                    sentence = f"reward {function.name} {outcome.failure}{raised_at(outcome.error)}"
                    failures[i] = failures[i] or CallResult(failure=sentence, error=outcome.error)
        results = []
        for total, part, failure in zip(totals, parts, failures, strict=True):
            if failure is None:
                results.append(RewardResult(total, part))
            else:
                details = None if failure.error is None else trace(failure.error)
                results.append(RewardResult(None, part, failure.failure, details))
        return results

    def _load(
        self, specs: Sequence[RewardFunction], path: str, problems: list[RecipeError]
    ) -> list[_Function]:
        functions: list[_Function] = []
        for n, spec in enumerate(specs):
            try:
                if spec.batch and spec.use in REWARDS:
                    hint = f"remove it: {spec.use} takes one sample at a time."
                    raise RecipeError(f"{path}[{n}].batch", "true", "false for a built-in reward", hint)
                call = self.check if spec.use == "checker" else load_function(spec, f"{path}[{n}]")
            except RecipeError as problem:
                problems.append(problem)
                continue
            name = spec.use.rpartition(":")[2]
            twins = sum(f.name.partition("#")[0] == name for f in functions)
            gate = asyncio.Semaphore(_ASYNC_AT_ONCE if is_async(call) else 1)
            functions.append(_Function(f"{name}#{twins + 1}" if twins else name, call, spec, gate))
        return functions

    async def _call(self, function: _Function, samples: list[RewardSample]) -> list[CallResult]:
        """Return checked outcomes, one per sample. Raise the first failure if reward.on_error is stop."""
        spec = function.spec
        if is_instant(spec.use):
            outcomes = []
            for sample in samples:
                try:
                    outcomes.append(CallResult(function.call(sample)))
                except BaseException as error:  # the checker of a custom task may raise anything
                    outcomes.append(raised(error))
        elif spec.batch:
            name = f"reward {spec.use} of {len(samples)} samples"
            (outcome,) = await call_each(function.call, [samples], spec.timeout_s, self._stop, lambda _: name)
            outcomes = _unpack(outcome, len(samples))
        else:
            async with function.gate:
                outcomes = await call_each(
                    function.call,
                    samples,
                    spec.timeout_s,
                    self._stop,
                    lambda s: f"reward {spec.use} of {s.key}",
                )
        outcomes = [_checked(outcome, spec.weight) for outcome in outcomes]
        for i, outcome in enumerate(outcomes):
            if self._stop and outcome.failure is not None:
                raise _error(function, outcome, samples[i]) from None
        return outcomes


def load_function(spec: RewardFunction, path: str) -> Callable[[Any], Any]:
    """Load the function that `use` names (not checker). Raise RecipeError at `path`.use if it is missing."""
    if spec.use not in REWARDS:
        function = find_function("reward", spec.use, REWARDS, f"{path}.use")
        _check_signature(function, spec, f"{path}.use")
        return function
    extra = REWARDS[spec.use].extra
    if extra is not None and importlib.util.find_spec(extra[0]) is None:
        raise MissingExtraError(f"reward {spec.use}", extra[1])
    return getattr(reward_functions, spec.use)


def _check_signature(function: Callable[..., Any], spec: RewardFunction, path: str) -> None:
    """Raise RecipeError unless the function takes one argument. For TRL's signature, show a wrapper."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    found = f"{spec.use!r}, which takes {signature}"
    expected = "a function of (samples), a list" if spec.batch else "a function of (sample)"
    name = spec.use.rpartition(":")[2]
    if {"prompts", "completions"} & signature.parameters.keys():
        columns = {"completions": "[sample.response_text]", "prompts": "[sample.prompt_text]"}
        columns["answer"] = "[sample.answer]"
        arguments = [
            f"{column}={columns.get(column) or f'[sample.row[{column!r}]]'}"
            for column, parameter in signature.parameters.items()
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and (column in columns or parameter.default is parameter.empty)
        ]
        hint = (
            f"this is TRL's signature; add a function that calls yours, and name it in {path}:\n"
            f"    def {name}_reward(sample):\n        return {name}({', '.join(arguments)})[0]"
        )
        raise RecipeError(path, found, expected, hint)
    try:
        signature.bind(None)
    except TypeError as error:
        raise RecipeError(path, found, expected, f"{error}; change the function's parameters") from None


def _unpack(outcome: CallResult, count: int) -> list[CallResult]:
    """Return a batch function's values, one per sample. Its failure is the failure of all samples."""
    if outcome.failure is None:
        values = outcome.value.tolist() if hasattr(outcome.value, "tolist") else outcome.value
        if isinstance(values, list | tuple) and len(values) == count:
            return [CallResult(value) for value in values]
        found = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
        outcome = CallResult(failure=f"returned {found}, expected a list with one number for each sample")
    failure = f"{outcome.failure} (for a batch of {count} samples)"
    return [CallResult(failure=failure, error=outcome.error)] * count


def _checked(outcome: CallResult, weight: float) -> CallResult:
    """Return the outcome with its value as a float, or a failure if it is not finite."""
    if outcome.failure is not None:
        return outcome
    number = finite_number(outcome.value)
    if number is not None and abs(weight * number) <= FLOAT32_MAX:
        return CallResult(number)
    hint = " (with batch: true, a function takes a list)" if isinstance(outcome.value, list) else ""
    return CallResult(failure=f"returned {short_repr(outcome.value)}, expected a finite number{hint}")


def _error(function: _Function, outcome: CallResult, sample: RewardSample) -> RewardError:
    """Return the error of a failure that stops the run, with its location and sample."""
    lines = [f"reward {function.spec.use} {outcome.failure}"]
    if outcome.error is not None and (where := frames(outcome.error)):
        lines.append(where)
    advice = "fix the function, or set reward.on_error: skip to exclude such samples."
    if isinstance(outcome.error, AttributeError) and isinstance(outcome.error.obj, RewardSample):
        advice = f"a sample has {', '.join(field.name for field in fields(RewardSample))}."
    lines += [
        f"  sample:   {sample.key}, task {sample.task}",
        f"  prompt:   {shorten(sample.prompt_text)!r}",
        f"  response: {shorten(sample.response_text)!r}",
        f"  answer:   {short_repr(sample.answer)}",
        f"  → {advice}",
    ]
    error = RewardError("\n".join(lines))
    error.details = "" if outcome.error is None else trace(outcome.error)
    return error
