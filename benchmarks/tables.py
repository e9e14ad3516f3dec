"""Pieces of the report's text: tables, ratios, where it was measured, warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Measured, medians, spread

BUSY_BELOW = 0.75
"""Cores that the best-served contender gets per thread, below which a machine counts as busy."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(found: Mapping[str, Any]) -> str:
    """The machine that results belong to."""
    machine = found["machine"]
    return f"{machine['processor']}, {machine['cores']} cores"


def faster(ratio: tuple[float, float, float]) -> str:
    """Return a ratio of times with its range."""
    middle, low, high = ratio
    return f"{middle:.1f}× ({low:.1f} to {high:.1f})"


def ranged(rounds: Sequence[Measured], name: str, style: str = ".2f") -> str:
    """Median of a number, with the least and the greatest."""
    low, high = spread(rounds, name)
    return f"{medians(rounds)[name]:{style}} ({low:{style}} to {high:{style}})"


def busy(raced: Mapping[str, Mapping[str, Sequence[Measured]]]) -> list[str]:
    """A warning for each setting in which nobody got the processor time that its threads could use."""
    warnings = []
    for title, rounds in raced.items():
        mids = [medians(found) for found in rounds.values()]
        most = max(mid["cpu_seconds"] / mid["seconds"] for mid in mids)
        if most < BUSY_BELOW * int(title.split()[0]):
            warnings.append(
                f"**{title}**: no contender got more than {most:.1f} cores. The machine was busy, or the "
                "work does not fill them."
            )
    return warnings
