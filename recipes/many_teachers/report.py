"""The tables of README.md, from records alone: scores at equal budgets, and published claims beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

NEAR = 0.05
"""A difference of mean scores that counts as none."""
BUDGETS = {"tokens": "equal teacher tokens", "seconds": "equal seconds"}
FIXED = ("base", "specialists", "uniform merge")
"""Rows that nothing is spent on once the specialists are there."""
Means = Mapping[str, Sequence[float]]
"""The mean score over the domains of each row, seed by seed."""

CLAIMS: list[tuple[str, str, Callable[[Means], Sequence[float]], Callable[[float], bool]]] = [
    (
        "SFT on right answers is as good as MOPD",
        "2610.04272",
        lambda means: _apart(means, "SFT on right answers", "MOPD"),
        lambda apart: apart >= -NEAR,
    ),
    (
        "the uniform merge is better than MOPD",
        "2609.35347",
        lambda means: _apart(means, "uniform merge", "MOPD"),
        lambda apart: apart > 0,
    ),
    (
        "MOPD from the merge is better than from the base",
        "2609.34745",
        lambda means: _apart(means, "MOPD from the merge", "MOPD"),
        lambda apart: apart > 0,
    ),
    (
        "merging lagging domains again is better still",
        "2609.34745",
        lambda means: _apart(means, "MOPD, merged again", "MOPD from the merge"),
        lambda apart: apart > 0,
    ),
    (
        "balance by sigma is better than by tokens",
        "2609.35347",
        lambda means: _apart(means, "MOPD, balance sigma", "MOPD"),
        lambda apart: apart > 0,
    ),
    (
        "a fixed negative advantage is as good as teachers",
        "2608.31046",
        lambda means: _apart(means, "no teacher (control)", "MOPD"),
        lambda apart: apart >= -NEAR,
    ),
]
"""What is claimed, by whom, the difference per seed that decides it, and when it holds."""


def report(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables as Markdown."""
    parts = []
    for name in dict.fromkeys(record["set"] for record in records):
        own = [record for record in records if record["set"] == name]
        found = {budget: scores_at(own, budget) for budget in BUDGETS}
        parts += [f"### Task set `{name}`", "", *_scores(own, found), "", *_claims(found), ""]
    return "\n".join(parts).rstrip()


def scores_at(records: Sequence[Mapping[str, Any]], budget: str) -> dict[str, list[float]]:
    """Return the mean score of each row and seed when the smallest budget of all rows is spent.

    Of rows that spend nothing of it, such as teacher tokens without teachers, the last point counts.
    """
    spent = [record["points"][-1][budget] for record in records if record["points"][-1][budget] > 0]
    least, found = min(spent, default=0.0), {}
    for record in records:
        within = [point for point in record["points"] if point[budget] <= least]
        point = (within or record["points"][:1])[-1]
        found.setdefault(record["row"], []).append(fmean(point["scores"].values()))
    return found


def _scores(records: Sequence[Mapping[str, Any]], found: Mapping[str, Means]) -> list[str]:
    lines = ["| row | teacher tokens | seconds | " + " | ".join(BUDGETS.values()) + " | at the end |"]
    lines.append("|---" * (4 + len(BUDGETS)) + "|")
    for row in dict.fromkeys(record["row"] for record in records):
        own = [record["points"][-1] for record in records if record["row"] == row]
        spent = [f"{fmean(point[budget] for point in own):,.0f}" for budget in BUDGETS]
        ends = [fmean(point["scores"].values()) for point in own]
        shown = ["–"] * 2 if row in FIXED else [_spread(found[budget][row]) for budget in BUDGETS]
        lines.append(f"| {row} | {' | '.join([*spent, *shown, _spread(ends)])} |")
    return lines


def _claims(found: Mapping[str, Means]) -> list[str]:
    lines = ["| claim | source | " + " | ".join(BUDGETS.values()) + " |", "|---" * (2 + len(BUDGETS)) + "|"]
    for claim, source, apart, holds in CLAIMS:
        cells = []
        for budget in BUDGETS:
            values = apart(found[budget])
            cells.append(
                f"{'holds' if holds(fmean(values)) else 'does not hold'}: {_spread(values, sign='+')}"
            )
        lines.append(f"| {claim} | [{source}](https://arxiv.org/abs/{source}) | {' | '.join(cells)} |")
    return lines


def _apart(means: Means, one: str, other: str) -> list[float]:
    return [a - b for a, b in zip(means[one], means[other], strict=True)]


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{fmean(values):{sign}.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
