"""What to look at next: rules over the metrics and the newest answers of a run, as pure functions.

Alarms come first, then warnings; hints about speed are given to a healthy run alone. Each advisory carries
the rule that fired, with its numbers, and a link to what shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from practicum.records.json_files import look_up, mapping
from practicum.view.metric_table import MetricTable

LAST = 5
"""Steps at the beginning and at the end of a run that are compared."""
ENTROPY_LEFT = 0.2
LONGER, TRUNCATED = 1.5, 0.2
FLAT = 0.8
STARVED, OVERFED = 0.1, 1.5
GAP_TIMES, GAP_SHARE = 3.0, 0.2
REPEATED, REPEATED_ANSWERS, PIECE, LEAST_CHARACTERS = 0.5, 0.2, 8, 64
MOST_OF_A_STEP = 0.7
FAILED = 0.1

Level = Literal["alarm", "warning", "hint"]


@dataclass(frozen=True, slots=True)
class Advisory:
    """One thing to look at. `link` is a place of the page below the run, `metric` a curve that shows it."""

    level: Level
    name: str
    sentence: str
    rule: str
    link: str = "rollouts"
    metric: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the rules look at. `answers` are lines of samples.jsonl of the newest step that has any."""

    metrics: MetricTable
    recipe: Mapping[str, Any]
    answers: Sequence[Mapping[str, Any]] = ()
    log_warnings: Sequence[str] = ()
    """Sentences that the run itself has warned with."""


def advisories(evidence: Evidence) -> list[Advisory]:
    """All that fire, in the order in which to look at them."""
    serious = [advisory for rule in RULES for advisory in rule(evidence)]
    hints = [] if serious else [advisory for rule in HINTS for advisory in rule(evidence)]
    order = {"alarm": 0, "warning": 1, "hint": 2}
    return sorted([*serious, *hints], key=lambda advisory: order[advisory.level])


def checks_fired(evidence: Evidence) -> Iterator[Advisory]:
    """A check that is set to warn has fired in the newest step."""
    newest = evidence.metrics.steps[-1] if evidence.metrics.steps else 0
    for name, count in evidence.metrics.at(newest).items():
        if name.startswith("checks/") and count > 0:
            check = name.removeprefix("checks/")
            yield Advisory(
                "alarm",
                f"check {check}",
                f"check {check} fired in step {newest}",
                f"{name} = {count:g}, expected 0. The sentence is in the log",
                "log?q=check",
                name,
            )


def not_finite(evidence: Evidence) -> Iterator[Advisory]:
    """Loss or gradient are no numbers any more."""
    for name in ("train/loss", "train/grad_norm"):
        steps, values = evidence.metrics.column(name)
        bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        if bad:
            yield Advisory(
                "alarm",
                "not finite",
                f"{name} is not finite since step {bad[0]}: lower train.lr, look at the steps before it",
                f"{name} is nan or infinite in {len(bad)} steps",
                f"step/{bad[0]}",
                name,
            )


def said_by_the_run(evidence: Evidence) -> Iterator[Advisory]:
    """What the run itself warned of (checks/learning.py): it learns nothing, answers are cut off."""
    for sentence in evidence.log_warnings:
        yield Advisory("warning", "learning", sentence, "a sign of checks/learning.py, said in log.txt")


def failed_sessions(evidence: Evidence) -> Iterator[Advisory]:
    """Many sessions fail."""
    recent = evidence.metrics.near(["rollout/failed", "rollout/sessions"], last=True, count=LAST)
    failed, sessions = sum(recent["rollout/failed"]), sum(recent["rollout/sessions"])
    if sessions and failed / sessions >= FAILED:
        yield Advisory(
            "alarm",
            "failed sessions",
            f"{failed / sessions:.0%} of the sessions of the last {LAST} steps failed",
            f"rollout/failed over rollout/sessions = {failed:g}/{sessions:g}, at least {FAILED:.0%}",
            "rollouts?finish=failed",
            "rollout/failed",
        )


def entropy_collapse(evidence: Evidence) -> Iterator[Advisory]:
    """The student's entropy has fallen to a small part of what it was."""
    pair = _ends(evidence.metrics, "train/entropy")
    if pair is None or pair[0] <= 0 or pair[1] >= ENTROPY_LEFT * pair[0] or _distils(evidence.recipe):
        return
    yield Advisory(
        "warning",
        "entropy collapse",
        f"entropy fell from {pair[0]:.2g} to {pair[1]:.2g} nats: answers to a prompt are getting equal",
        f"mean of train/entropy over the last {LAST} steps below {ENTROPY_LEFT:g} × that of the first {LAST}",
        "rollouts?sort=-step",
        "train/entropy",
        {"first": pair[0], "last": pair[1]},
    )


def length_inflation(evidence: Evidence) -> Iterator[Advisory]:
    """Answers get longer, and many of them are cut off."""
    pair, cut = (
        _ends(evidence.metrics, "rollout/response_tokens"),
        _ends(evidence.metrics, "rollout/truncated"),
    )
    if pair is None or cut is None or pair[1] <= LONGER * pair[0] or cut[1] < TRUNCATED:
        return
    yield Advisory(
        "warning",
        "length inflation",
        f"answers grew from {pair[0]:.0f} to {pair[1]:.0f} tokens, and {cut[1]:.0%} of them are cut off",
        f"rollout/response_tokens above {LONGER:g} × its start, rollout/truncated at least {TRUNCATED:.0%}: "
        f"means of {LAST} steps",
        "rollouts?finish=length&sort=-tokens",
        "rollout/response_tokens",
        {"first": pair[0], "last": pair[1], "truncated": cut[1]},
    )


def flat_groups(evidence: Evidence) -> Iterator[Advisory]:
    """Most groups have no difference to learn from."""
    pair = _ends(evidence.metrics, "groups/flat")
    if pair is None or pair[1] < FLAT:
        return
    reward = _ends(evidence.metrics, "reward/mean") or (0.0, 0.0)
    why = "the prompts are too easy by now" if reward[1] > 0.5 else "the prompts are too hard"
    yield Advisory(
        "warning",
        "flat groups",
        f"{pair[1]:.0%} of the groups have equal rewards (mean {reward[1]:.2g}): {why}, little is learnt",
        f"mean of groups/flat over the last {LAST} steps at least {FLAT:.0%}",
        "rollouts?flat=1",
        "groups/flat",
        {"flat": pair[1], "reward": reward[1]},
    )


def teacher_shares(evidence: Evidence) -> Iterator[Advisory]:
    """A teacher's gradient is far from its target: starved, or far above it."""
    for name, (share, target, step) in gradient_shares(evidence.metrics, evidence.recipe).items():
        numbers = {"share": share, "target": target}
        said = f"{name}: {share:.0%} of the gradient, target {target:.0%}"
        place, metric = f"rollouts?teacher={name}&step={step}", f"teacher/{name}/gradient_share"
        if share < STARVED * target:
            rule = f"gradient share of step {step} below {STARVED:g} × its target: route.shares sets its part"
            yield Advisory("warning", "starved teacher", said, rule, place, metric, numbers)
        elif share > OVERFED * target:
            rule = f"gradient share of step {step} above {OVERFED:g} × its target: route.shares sets its part"
            yield Advisory("warning", "large share", said, rule, place, metric, numbers)


def growing_gap(evidence: Evidence) -> Iterator[Advisory]:
    """Engine and learner drift apart."""
    pair = _ends(evidence.metrics, "train/gap_mean")
    limit = float(look_up(evidence.recipe, "checks.logprob_gap_max") or 0.05)
    if pair is None or pair[1] < GAP_SHARE * limit or pair[1] < GAP_TIMES * pair[0]:
        return
    yield Advisory(
        "warning",
        "train/rollout gap",
        f"engine and learner logprobs differ by {pair[1]:.2g} nats per token, {pair[0]:.2g} at the start",
        f"train/gap_mean at least {GAP_TIMES:g} × its start and {GAP_SHARE:g} × checks.logprob_gap_max, "
        f"which is {limit:g}",
        "metrics?q=gap",
        "train/gap_mean",
        {"first": pair[0], "last": pair[1]},
    )


def repetition(evidence: Evidence) -> Iterator[Advisory]:
    """Answers repeat themselves."""
    texts = [str(answer.get("response") or "") for answer in evidence.answers]
    repeated = [share for text in texts if (share := repeated_share(text)) >= REPEATED]
    if not texts or len(repeated) < max(1, REPEATED_ANSWERS * len(texts)):
        return
    step = evidence.answers[0].get("step", 0)
    yield Advisory(
        "warning",
        "repetition",
        f"{len(repeated)} of {len(texts)} recorded answers of step {step} repeat themselves",
        f"{REPEATED:.0%} or more of an answer's pieces of {PIECE} characters came before, in at least "
        f"{REPEATED_ANSWERS:.0%} of the answers; only those of {LEAST_CHARACTERS} characters or more count",
        f"rollouts?step={step}&sort=-tokens",
        "rollout/response_tokens",
        {"answers": len(repeated)},
    )


def slow_stage(evidence: Evidence) -> Iterator[Advisory]:
    """One stage takes most of a step."""
    recent = {name: evidence.metrics.near([name], True, LAST)[name] for name in evidence.metrics.names}
    whole = fmean(recent["time/step"]) if recent.get("time/step") else 0.0
    advice = {
        "rollout": "more rollout.slots or rollout.replicas, shorter rollout.max_new_tokens",
        "teachers": "teachers in their own processes (placement: own) score while others roll out",
        "reward": "more of runtime.reward_workers",
    }
    for stage, keys in advice.items():
        # With a lag, what is sampled ahead costs what the learner waits for it.
        timed = "waited" if stage in ("rollout", "reward") and recent.get("time/waited") else stage
        share = fmean(recent[f"time/{timed}"]) / whole if whole and recent.get(f"time/{stage}") else 0.0
        if share >= MOST_OF_A_STEP:
            said = f"{stage} takes {share:.0%} of a step: {keys}"
            rule = f"time/{timed} at least {MOST_OF_A_STEP:.0%} of time/step, means of {LAST} steps"
            yield Advisory("hint", "slow stage", said, rule, "step/last", f"time/{timed}", {"share": share})


Rule = Callable[[Evidence], Iterator[Advisory]]
RULES: tuple[Rule, ...] = (
    not_finite,
    checks_fired,
    failed_sessions,
    said_by_the_run,
    teacher_shares,
    entropy_collapse,
    length_inflation,
    flat_groups,
    growing_gap,
    repetition,
)
HINTS: tuple[Rule, ...] = (slow_stage,)


def gradient_shares(metrics: MetricTable, recipe: Mapping[str, Any]) -> dict[str, tuple[float, float, int]]:
    """Each teacher's newest share of the gradient, its target, and the step that measured it."""
    found = {}
    targets = mapping(look_up(recipe, "route.shares"))
    for name in metrics.names:
        parts = name.split("/")
        if parts[0] == "teacher" and parts[-1] == "gradient_share":
            teacher = "/".join(parts[1:-1])
            steps, values = metrics.column(name)
            prompts = metrics.last.get(f"teacher/{teacher}/prompts_share", 0.0)
            found[teacher] = (values[-1], float(targets.get(teacher, prompts)), steps[-1])
    return found


def repeated_share(text: str) -> float:
    """Share of a text's pieces that came before in it; 0 for a short one."""
    if len(text) < LEAST_CHARACTERS:
        return 0.0
    pieces = [text[at : at + PIECE] for at in range(len(text) - PIECE + 1)]
    return 1 - len(set(pieces)) / len(pieces)


def _ends(metrics: MetricTable, name: str) -> tuple[float, float] | None:
    """Means of the first and of the last steps that have a metric; None before there are twice as many."""
    values = metrics.column(name)[1]
    if len(values) < 2 * LAST:
        return None
    return fmean(values[:LAST]), fmean(values[-LAST:])


def _distils(recipe: Mapping[str, Any]) -> bool:
    """A student that becomes as sure as its teachers is meant to."""
    return bool(recipe.get("teachers")) or look_up(recipe, "algorithm.loss") == "supervised"
