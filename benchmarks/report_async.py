"""The report's sections on rollouts ahead of the learner, from async_step.json and async_evidence.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import medians, paired_ratio
from benchmarks.tables import faster, ranged, table, where

SYNC = ("sync, 1 thread", "sync, 2 threads")


def async_step(found: Mapping[str, Any]) -> str:
    """Seconds per step of each way and kind of work, and scores by step and by second."""
    return f"### Rollouts ahead of the learner, {where(found)}\n\n{gains(found)}"


def gains(found: Mapping[str, Any]) -> str:
    """The tables of it."""
    rows = []
    for kind, raced in found["raced"].items():
        best = min(SYNC, key=lambda name: medians(raced[name])["seconds"])
        for name, rounds in raced.items():
            goal = found["goals"].get(kind, {}).get(name)
            ratio = "" if name in SYNC else faster(paired_ratio(raced[best], rounds, "seconds"), goal)
            waited = "" if name in SYNC else f"{medians(rounds)['waited']:.2f}"
            cpu = f"{medians(rounds)['cpu_seconds']:.2f}"
            rows.append([kind, name, ranged(rounds, "seconds"), cpu, waited, ratio])
    head = ["work", "way", "s/step", "of processor", "learner waited", "faster than the best synchronous way"]
    return "\n\n".join([table(head, rows), *([_scores(found["scores"])] if found["scores"] else [])])


def _scores(scores: Mapping[str, list[dict[str, float]]]) -> str:
    """When each way of training came to the score that all of them reach."""
    reached = min(max(row["score"] for row in rows) for rows in scores.values())
    lines = []
    for name, rows in scores.items():
        first = next(row for row in rows if row["score"] >= reached)
        lines.append([name, f"{rows[0]['score']:.2f}", f"{rows[-1]['score']:.2f}"])
        lines[-1] += [f"{first['step']:.0f}", f"{first['seconds']:.0f}"]
    head = ["way", "greedy score at first", "at the end", f"steps until {reached:.2f}", "seconds until then"]
    return table(head, lines)


def async_evidence(found: Mapping[str, Any]) -> str:
    """What dropping late groups does to long prompts, and what unweighted stale rows do."""
    parts = [f"### What a lag can do to learning, {where(found)}", dropping(found), weighing(found)]
    return "\n\n".join(parts)


def dropping(found: Mapping[str, Any]) -> str:
    """Long prompts, if late groups are dropped and if not."""
    late = found["settings"]["late"]
    dropped = [
        [name, f"{run['long trained']:.0%}", *(f"{run[score]:.2f}" for score in _SCORES)]
        for name, run in found["dropping"].items()
    ]
    head = ["schedule", "long prompts among those trained on", *(score for score in _SCORES)]
    long, short = f"{late['long']:.0%}", f"{late['short']:.0%}"
    said = f"Groups of long prompts are late in {long} of cases, of short ones in {short}."
    return f"{said}\n\n{table(head, dropped)}"


def weighing(found: Mapping[str, Any]) -> str:
    """Rewards and the check by loss and learning rate."""
    rows = []
    for run in sorted(found["weights"].values(), key=lambda run: run["lr"]):
        sizes = [size for size in run["sizes"] if size is not None]
        least = f"{min(sizes):.2f}" if sizes else "–"
        told = [str(run[key]) if run[key] is not None else "–" for key in ("warned", "collapsed")]
        last = sum(run["rewards"][-5:]) / len(run["rewards"][-5:])
        rows.append([f"{run['lr']:g}", run["way"], f"{run['rewards'][0]:.2f}", f"{last:.2f}", least, *told])
    head = [
        "learning rate",
        "way",
        "reward at first",
        "last 5 steps",
        "least sample size",
        "check spoke in step",
        "collapsed in step",
    ]
    settings = found["settings"]
    said = (
        f"REINFORCE, weighted and not, and DPPO, with {settings['lag']} steps of lag, over "
        f"{settings['collapse_steps']} steps. *Collapsed*: from then on the reward is below half of its "
        "best, for 5 steps or more."
    )
    return f"{said}\n\n{table(head, rows)}"


_SCORES = ("first greedy/long", "greedy/long", "first greedy/short", "greedy/short")
