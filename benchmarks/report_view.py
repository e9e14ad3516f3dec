"""The report's section on the viewer, from results/view_page.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import medians, spread
from benchmarks.tables import table, verdict, where

WHAT = {
    "first_paint": "Overview, from the navigation to drawn charts",
    "curves": "Metrics, the charts in view",
    "rows": "Rollouts, all rows sent and the first ones drawn",
    "filter": "Rollouts, by domain and sorted by reward",
    "tokens": "Tokens of one answer",
}


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
