"""The report's sections on the record and the viewer, from results/record_cost.json and view_page.json."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.harness import medians, paired_ratio, spread
from benchmarks.tables import table, verdict, where

WHAT = {
    "first_paint": "Overview, from the navigation to drawn charts",
    "curves": "Metrics, the charts in view",
    "rows": "Rollouts, all rows sent and the first ones drawn",
    "filter": "Rollouts, by domain and sorted by reward",
    "tokens": "Tokens of one answer",
}


def record_cost(found: Mapping[str, Any]) -> str:
    """Processor time of the recording code by part, as a share of the step, and whole steps beside it."""
    goal, parts = found["settings"]["goal"], found["settings"]["parts"]
    rows = []
    for kind, rounds in found["raced"].items():
        for name, measured in rounds.items():
            if name == "none":
                continue
            shares = [sum(one[part] for part in parts) / one["cpu_seconds"] for one in measured]
            told = f"{median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%})"
            if name == "default":
                told += verdict(median(shares) < goal, f"under {goal:.0%}")
            mid = medians(measured)
            middle, low, high = paired_ratio(measured, rounds["none"], "cpu_seconds")
            whole = f"{middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
            spent = [f"{1000 * mid[part]:.1f}" for part in parts]
            rows.append([kind, name, f"{mid['cpu_seconds']:.2f}", *spent, told, whole])
    columns = [f"{part}, ms" for part in parts]
    head = [
        "step",
        "`track.record`",
        "s of processor",
        *columns,
        "share of the step",
        "whole steps to `none`",
    ]
    text = (
        "Processor time of the code that only runs for the record, by the clock of its thread. The last "
        "column compares whole steps, round by round: their own spread is larger than what recording costs."
    )
    return "\n\n".join([f"### Recording, {where(found)}", text, table(head, rows)])


def view_page(found: Mapping[str, Any]) -> str:
    """Seconds until each place is drawn, and the goals."""
    settings, rounds = found["settings"], found["rounds"]
    middle = medians(rounds)
    rows = []
    for name, what in WHAT.items():
        low, high = spread(rounds, name)
        goal = found["goals"].get(name)
        told = "" if goal is None else verdict(middle[name] <= goal, f"under {goal:g} s")
        rows.append([what, f"{middle[name]:.3f} ({low:.3f} to {high:.3f}){told}"])
    size = f"{settings['steps']:,} steps, {settings['rows']:,} recorded rows, {found['megabytes']:.0f} MB"
    text = f"{size}. The server reads the files once, in {found['reading']['seconds']:.1f} s."
    return "\n\n".join([f"### The viewer, {where(found)}", text, table(["place", "s"], rows)])
