"""Rules that warn if a run may not be learning, as pure functions of its metrics.

They never stop a run. The log reports each finding once, with the key that is likely to fix it. `practicum
view` shows current findings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.schema.recipe import Recipe

Rows = Sequence[Mapping[str, float]]
"""Metrics of the steps so far, oldest first."""
SEVERAL, MANY = 5, 10
"""Number of consecutive steps before a finding is reported."""
MOST, FEW, ENTROPY_LEFT, FAILED = 0.5, 0.05, 0.2, 0.1
STARVED, OVERFED = 0.1, 2.0
_FLAT, _GRADIENT, _CUT = "groups/zero_variance", "train/grad_norm", "rollout/truncated"
_FULL, _REPEATED = "rollout/context_full", "rollout/repetition"
_REWARD, _SPREAD, _ENTROPY = "reward/mean", "reward/std", "train/entropy"
_STEP = ("train/loss", _FLAT, _GRADIENT, _CUT, _REWARD, _SPREAD)
"""A row without any of these is an evaluation, or a step that trains only the critic."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a rule. Only the first of each `kind` is reported."""

    kind: str
    sentence: str
    metric: str
    """The metric that shows it."""
    rows: str = ""
    """A query of the viewer's Rollouts pane for recorded rows that show it."""
    level: Literal["alarm", "warning"] = "warning"


@dataclass(frozen=True, slots=True)
class Signal:
    """Facts about a run's recipe that the rules use."""

    rewards: bool
    groups: bool
    """True if the advantage estimator compares the responses to a prompt."""
    teachers: bool
    supervised: bool
    max_new_tokens: int
    shares: Mapping[str, float]
    """Targets of `route.shares`."""
    context: int | None = None
    """rollout.context, if it is set."""

    @classmethod
    def of(cls, recipe: Recipe) -> Signal:
        compares = estimator_traits(recipe.algorithm.advantage).compares_groups
        return cls(
            recipe.uses_reward,
            compares and recipe.has_advantage_estimator,
            bool(recipe.teachers),
            recipe.is_supervised,
            recipe.rollout.max_new_tokens,
            recipe.route.shares or {},
            recipe.rollout.context,
        )


class LearningWatch:
    """Reports each kind of finding once over the steps of a run."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self._rows: list[Mapping[str, float]] = []
        self._said: set[str] = set()

    def note(self, metrics: Mapping[str, float]) -> list[str]:
        if not any(name in metrics for name in _STEP):
            return []
        self._rows.append(metrics)
        new = [one for one in findings(self._rows, self.signal) if one.kind not in self._said]
        self._said |= {one.kind for one in new}
        return [one.sentence for one in new]


def findings(rows: Rows, signal: Signal) -> list[Finding]:
    """Return the findings on these steps, the first of each kind."""
    steps = [row for row in rows if any(name in row for name in _STEP)]
    first: dict[str, Finding] = {}
    for finding in (finding for rule in RULES for finding in rule(steps, signal) if steps):
        first.setdefault(finding.kind, finding)
    return list(first.values())


def not_finite(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report a loss or gradient that is not finite."""
    for name in ("train/loss", _GRADIENT):
        if rows and not math.isfinite(rows[-1].get(name, 0.0)):
            said = f"{name} is not finite: lower train.lr, and look at the steps before it"
            yield Finding("finite", said, name, level="alarm")


def failed_sessions(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report many failing sessions."""
    failed, sessions = _last(rows, "rollout/failed", SEVERAL), _last(rows, "rollout/sessions", SEVERAL)
    if sessions and failed and sum(failed) >= FAILED * sum(sessions):
        said = f"{sum(failed) / sum(sessions):.0%} of the sessions of the last {SEVERAL} steps failed: "
        yield Finding(
            "failures", f"{said}log.txt has the reasons", "rollout/failed", "finish=failed", "alarm"
        )


def flat_groups(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report groups with equal rewards for several steps, if the estimator compares sessions."""
    flat = _last(rows, _FLAT, SEVERAL)
    if signal.groups and signal.rewards and flat and min(flat) == 1.0 and not _has_risen(rows):
        said = (
            f"in the last {SEVERAL} steps all responses to a prompt had the same reward (mean "
            f"{_reward(rows)}): the task is too hard or too easy for this model, or the reward does not "
            "distinguish responses. Look at samples.jsonl, raise rollout.samples, change the task, or start "
            "from a model that solves some prompts"
        )
        yield Finding("signal", said, _FLAT, "flat=1")


def zero_gradient(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report weights that have not changed for several steps."""
    norms = _last(rows, _GRADIENT, SEVERAL)
    if not norms or max(norms) > 0.0 or _has_risen(rows):
        return
    why = "the SFT examples have nothing left to learn: look at samples.jsonl and tasks"
    if signal.rewards:
        why = f"all responses are equally good (mean reward {_reward(rows)}): look at reward.functions"
    elif signal.teachers:
        why = "student and teachers agree on every token: look at teachers.<name>.model and at route"
    said = f"the gradient was 0 in the last {SEVERAL} steps, so the weights did not change: {why}"
    yield Finding("signal", said, _GRADIENT)


def constant_reward(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report a reward that is equal for all responses of many steps."""
    rewards, spreads = _last(rows, _REWARD, MANY), _last(rows, _SPREAD, MANY)
    constant = rewards and spreads and max(spreads) == 0.0 and max(rewards) == min(rewards)
    if constant and signal.rewards and not _has_risen(rows):
        said = (
            f"every response of the last {MANY} steps had the reward {_reward(rows)}: the reward does not "
            "depend on the response, or no response is correct. Look at reward.functions and samples.jsonl"
        )
        yield Finding("signal", said, _REWARD)


def cut_answers(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report truncated responses for several steps."""
    shares = _last(rows, _CUT, SEVERAL)
    if shares and min(shares) > MOST:
        limit, advice = f"at rollout.max_new_tokens = {signal.max_new_tokens}", "raise it"
        if 2 * fmean(row.get(_FULL, 0.0) for row in rows[-SEVERAL:]) > fmean(shares):
            context = "" if signal.context is None else f" = {signal.context}"
            limit = f"because the context was full (rollout.context{context})"
            advice = "raise it up to the model's, lower agent.turns, or set agent.loop: compress"
        said = (
            f"{fmean(shares):.0%} of the responses of the last {SEVERAL} steps were truncated {limit}: "
            f"{advice}, or add the token that ends a response to rollout.stop"
        )
        yield Finding("length", said, _CUT, "finish=length")


def endless_answers(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report truncation and repetition that rise together: responses that loop."""
    both = [row for row in rows if _CUT in row and _REPEATED in row][-2 * MANY :]
    before, after = both[:MANY], both[MANY:]
    if len(after) < MANY:
        return
    cut, repeated = ([[row[key] for row in part] for part in (before, after)] for key in (_CUT, _REPEATED))
    if fmean(cut[1]) > FEW and _rises(*cut) and _rises(*repeated):
        said = (
            f"truncated responses rose from {fmean(cut[0]):.0%} to {fmean(cut[1]):.0%}, and repetition in "
            f"responses from {fmean(repeated[0]):.0%} to {fmean(repeated[1]):.0%}: they loop. Lower "
            "train.lr, and check that rewards or teachers teach when to stop"
        )
        yield Finding("circles", said, _REPEATED, "finish=length")


def entropy_collapse(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report a collapse of the student's entropy, except with teachers, where it should fall."""
    values = [row[_ENTROPY] for row in rows if _ENTROPY in row]
    if len(values) < 2 * SEVERAL or signal.teachers or signal.supervised:
        return
    first, last = fmean(values[:SEVERAL]), fmean(values[-SEVERAL:])
    if 0 <= last < ENTROPY_LEFT * first and not _has_risen(rows):
        said = f"entropy fell from {first:.2g} to {last:.2g} nats: responses to a prompt become equal"
        yield Finding("entropy", f"{said}. Lower train.lr, or raise algorithm.entropy", _ENTROPY)


def teacher_shares(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report a teacher whose share of the gradient is far from its target in several measurements."""
    for name, (share, target) in gradient_shares(rows, signal.shares, SEVERAL).items():
        if share < STARVED * target or share > OVERFED * target:
            said = f"{name}: {share:.0%} of the gradient, target {target:.0%} (route.shares sets it)"
            yield Finding(f"share of {name}", said, f"teacher/{name}/gradient_share", f"teacher={name}")


def teacher_misleads(rows: Rows, signal: Signal) -> Iterator[Finding]:
    """Report a student that moves away from a teacher while the reward on that teacher's prompts falls."""
    # Means of the last steps must differ from those before by more than two standard errors.
    for metric in rows[-1] if rows else ():
        if not (metric.startswith("teacher/") and metric.endswith("/kl")):
            continue
        name = metric.removeprefix("teacher/").removesuffix("/kl")
        reward = f"teacher/{name}/reward"
        both = [row for row in rows if metric in row and reward in row][-2 * MANY :]
        before, after = both[:MANY], both[MANY:]
        if len(after) < MANY:
            continue
        kl, score = ([[row[key] for row in part] for part in (before, after)] for key in (metric, reward))
        if _rises(*kl) and _rises(*reversed(score)):
            said = (
                f"{name}: KL to this teacher rose from {fmean(kl[0]):.3g} to {fmean(kl[1]):.3g} while "
                f"the reward on its prompts fell from {fmean(score[0]):.3g} to {fmean(score[1]):.3g}. "
                "Lower train.lr, and check that the teacher is better than the student on this task"
            )
            yield Finding(f"collapse of {name}", said, metric, f"teacher={name}")


RULES: tuple[Callable[[Rows, Signal], Iterator[Finding]], ...] = (
    not_finite,
    failed_sessions,
    flat_groups,
    zero_gradient,
    constant_reward,
    cut_answers,
    endless_answers,
    entropy_collapse,
    teacher_shares,
    teacher_misleads,
)


def gradient_shares(
    rows: Rows, targets: Mapping[str, float], least: int = 1
) -> dict[str, tuple[float, float]]:
    """Return each teacher's recent mean gradient share and its target, by default its share of prompts.
    Teachers with fewer than `least` measurements are left out, because single steps are noisy."""
    shares: dict[str, list[float]] = {}
    prompts: dict[str, float] = {}
    for row in rows:
        for metric, share in row.items():
            if metric.startswith("teacher/") and metric.endswith("/gradient_share"):
                name = metric.removeprefix("teacher/").removesuffix("/gradient_share")
                shares.setdefault(name, []).append(share)
                prompts[name] = row.get(f"teacher/{name}/prompts_share", 0.0)
    return {
        name: (fmean(measured[-SEVERAL:]), float(targets.get(name, prompts[name])))
        for name, measured in shares.items()
        if len(measured) >= least
    }


def _last(rows: Rows, name: str, steps: int) -> list[float]:
    """Return a metric in the last steps, or [] if steps or values are missing."""
    values = [row[name] for row in rows[-steps:] if name in row]
    return values if len(values) == steps else []


def _rises(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return True if the mean rises by more than two standard errors."""
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return fmean(after) - fmean(before) > 2 * error


def _has_risen(rows: Rows) -> bool:
    """Return True if the reward is above the first step's, so that a task may be fully learned."""
    rewards = [row[_REWARD] for row in (rows[0], rows[-1]) if _REWARD in row]
    return len(rewards) == 2 and rewards[1] > rewards[0]


def _reward(rows: Rows) -> str:
    return f"{rows[-1].get(_REWARD, 0.0):.3g}"
