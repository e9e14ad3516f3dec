"""The report's sections on the record and the viewer, from results/record_cost.json and view_page.json."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Processor seconds of a step by what is recorded, and how much more that is."""
    rows, goal = [], found["settings"]["goal"]
    for kind, rounds in found["raced"].items():
        for name, measured in rounds.items():
            middle, low, high = paired_ratio(measured, rounds["none"], "cpu_seconds")
            more = "" if name == "none" else f"{middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
            if name == "default":
                more += verdict(middle - 1 < goal, f"under {goal:.0%}")
            mid = medians(measured)
            rows.append([kind, name, f"{mid['seconds']:.2f}", f"{mid['cpu_seconds']:.2f}", more])
    head = ["step", "`track.record`", "s/step", "of processor", "more of it than without"]
    return "\n\n".join([f"### Recording, {where(found)}", table(head, rows)])


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
