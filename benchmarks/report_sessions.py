"""The report's sections on sessions, padding and balance, each from one file of results/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Measured, medians, paired_ratio
from benchmarks.tables import busy, ranged, table, verdict, where


def sessions(found: Mapping[str, Any]) -> str:
    """Sessions per second, and how much of the time the engine was at work."""
    raced, goal = found["raced"]["1 thread"], found["goal"]
    ours, instant, _ = raced
    rows = []
    for name, measured in raced.items():
        mid = medians(measured)
        ratio, low, high = paired_ratio(measured, raced[instant], "sessions_per_second")
        work = f"{mid['busy']:.1%}"
        if name == ours:
            work += verdict(mid["busy"] >= goal, f"{goal:.0%}")
        speed = [ranged(measured, "sessions_per_second", ".1f"), f"{mid['tokens_per_second']:,.0f}"]
        spent = [f"{mid['seconds']:.2f}", f"{mid['cpu_seconds']:.2f}"]
        told = "" if name == instant else f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        rows.append([name, *speed, *spent, work, f"{1e3 * mid['longest_pause']:.0f}", told])
    mid = medians(raced[ours])
    head = [
        *("sessions", "sessions/s", "tokens/s", "s", "of processor", "engine at work"),
        *("longest pause, ms", f"÷ {instant}"),
    ]
    text = (
        f"In each round, {mid['tokens']:,.0f} tokens are sampled and {mid['read_tokens']:,.0f} are read: "
        "prompts, and of each later turn what is new."
    )
    title = f"### Sessions, {where(found)}"
    return "\n\n".join([title, table(head, rows), text, *busy(found["raced"])])


def padding_cost(found: Mapping[str, Any]) -> str:
    """What padding adds to the stages that it reaches, and to the whole step."""
    raced, settings, goal = found["raced"]["1 thread"], found["settings"], found["goal"]
    padded, bare = raced.values()
    added = added_share(padded, bare)
    rows = []
    for name, measured in raced.items():
        mid = medians(measured)
        stages = [f"{1e3 * mid[stage]:.1f}" for stage in ("pad", "clear")]
        spent = [ranged(measured, "seconds"), f"{mid['cpu_seconds']:.2f}"]
        rows.append([name, f"{mid['padding_rows']:.0f}", *spent, *stages])
    head = ["step", "padding rows", "s/step", "of processor", "pad, ms", "clear, ms"]
    whole = [paired_ratio(padded, bare, name) for name in ("seconds", "cpu_seconds")]
    clock, cpu = (f"{ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})" for ratio, low, high in whole)
    text = (
        f"{settings['rows']:,} rows in optimizer steps of {settings['minibatch_rows']}. Padding adds "
        f"{added:.2%} of the step in `pad` and `clear`{verdict(added < goal, f'{goal:.0%}')}. "
        f"The whole step differs by {clock} in time and {cpu} in processor time."
    )
    title = f"### Cost of padding, {where(found)}"
    return "\n\n".join([title, table(head, rows), text, *busy(found["raced"])])


def added_share(padded: Sequence[Measured], bare: Sequence[Measured]) -> float:
    """What padding adds to the two stages that it reaches, in parts of the step."""
    more, less = medians(padded), medians(bare)
    added = sum(more[stage] - less[stage] for stage in ("pad", "clear"))
    return added / less["seconds"]


def balance(found: Mapping[str, Any]) -> str:
    """Imbalance before and after for each shape."""
    rows = []
    for shape in found["shapes"]:
        sizes = [f"{shape[name]:,}" for name in ("rows", "minibatch", "ranks")]
        lengths = [f"{shape['mean']:.0f}", f"{shape['longest']:,}"]
        told = [f"{shape[name]:.3f}" for name in ("before", "after", "least")]
        rows.append([*sizes, *lengths, *told, f"{1e3 * shape['seconds']:.1f}"])
    head = [
        *("rows", "a step", "ranks", "mean tokens", "longest", "before", "after"),
        *("least there can be", "ms for all"),
    ]
    return "\n\n".join([f"### Balance, {where(found)}", table(head, rows)])
