"""The tables of README.md, from records alone: scores at equal budgets, and published claims beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

NEAR = 0.05
"""A difference of mean scores that counts as none, where a claim is that one way is as good as another."""
BUDGETS = {"tokens": "equal teacher tokens", "seconds": "equal seconds"}
FIXED = ("base", "specialists", "uniform merge")
"""Rows that nothing is spent on once the specialists are there."""
ROOM = 0.05
"""Least headroom of a specialist, for a domain to count in the share of the headroom."""
Record = Mapping[str, Any]
Scores = dict[str, dict[int, float]]
"""The mean score over the domains of each row, by seed."""

CLAIMS = [
    ("SFT on right answers is as good as MOPD", "2610.04272", "SFT on right answers", "MOPD", -NEAR),
    ("the uniform merge is better than MOPD", "2609.35347", "uniform merge", "MOPD", 0.0),
    ("MOPD from the merge is better than from the base", "2609.34745", "MOPD from the merge", "MOPD", 0.0),
    (
        "merging lagging domains again is better still",
        "2609.34745",
        "MOPD, merged again",
        "MOPD from the merge",
        0.0,
    ),
    ("balance by sigma is better than by tokens", "2609.35347", "MOPD, balance sigma", "MOPD", 0.0),
    (
        "a fixed negative advantage is as good as teachers",
        "2608.31046",
        "no teacher (control)",
        "MOPD",
        -NEAR,
    ),
    (
        "leaving mismatched tokens out is better than including them",
        "2610.08448",
        "other tokenizer, mismatches left out",
        "other tokenizer, mismatches included",
        0.0,
    ),
]
"""What is claimed, by whom, and the two rows that decide it: the first has to be more than so much better."""


def report(records: Sequence[Record]) -> str:
    """Return the tables as Markdown."""
    parts = []
    for name in dict.fromkeys(record["set"] for record in records):
        own = [record for record in records if record["set"] == name]
        found = {budget: scores_at(own, budget) for budget in BUDGETS}
        seeds = " and ".join(str(seed) for seed in dict.fromkeys(record["seed"] for record in own))
        heading = f"### Task set `{name}`, seed{'s' * (' ' in seeds)} {seeds}"
        parts += [heading, "", *_scores(own, found), "", *_claims(found), ""]
    return "\n".join(parts).rstrip()


def scores_at(records: Sequence[Record], budget: str) -> Scores:
    """Return the scores when each row has spent what the row spends that spends least of this budget.

    Rows that spend none of it are left out, but for FIXED, which have one score.
    """
    spent = [record["points"][-1][budget] for record in records if record["points"][-1][budget] > 0]
    least, found = min(spent, default=0.0), Scores()
    for record in records:
        points = record["points"]
        if points[-1][budget] == 0 and record["row"] not in FIXED:
            continue
        point = [point for point in points if point[budget] <= least][-1]
        found.setdefault(record["row"], {})[record["seed"]] = fmean(point["scores"].values())
    return found


def headroom(records: Sequence[Record], row: str) -> list[float]:
    """Return the share of the way from the base to the specialists at the end of a row, by seed."""
    ends = {(record["seed"], record["row"]): record["points"][-1]["scores"] for record in records}
    shares = []
    for seed in dict.fromkeys(record["seed"] for record in records if record["row"] == row):
        base, best, own = (ends[seed, name] for name in ("base", "specialists", row))
        ways = [(own[d] - base[d]) / (best[d] - base[d]) for d in base if best[d] - base[d] > ROOM]
        shares += [fmean(ways)] if ways else []
    return shares


def _scores(records: Sequence[Record], found: Mapping[str, Scores]) -> list[str]:
    heads = ["row", "teacher tokens", "seconds", *BUDGETS.values(), "at the end", "of the headroom"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in dict.fromkeys(record["row"] for record in records):
        ends = [record["points"][-1] for record in records if record["row"] == row]
        cells = [row, *(f"{fmean(end[budget] for end in ends):,.0f}" for budget in BUDGETS)]
        is_fixed = row in FIXED
        cells += [
            "–" if is_fixed or row not in found[b] else spread([*found[b][row].values()]) for b in BUDGETS
        ]
        cells += [spread([fmean(end["scores"].values()) for end in ends])]
        cells += ["–" if row in FIXED[:2] else spread(headroom(records, row))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _claims(found: Mapping[str, Scores]) -> list[str]:
    lines = ["| claim | source | " + " | ".join(BUDGETS.values()) + " |", "|---" * (2 + len(BUDGETS)) + "|"]
    for claim, source, one, other, least in CLAIMS:
        cells = [
            verdict(found[budget].get(one, {}), found[budget].get(other, {}), least) for budget in BUDGETS
        ]
        if set(cells) != {"–"}:
            lines.append(f"| {claim} | [{source}](https://arxiv.org/abs/{source}) | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def verdict(one: Mapping[int, float], other: Mapping[int, float], least: float) -> str:
    """Say whether `one` is more than `least` better than `other`: only if all seeds agree."""
    apart = [one[seed] - other[seed] for seed in one if seed in other]
    if not apart:
        return "–"
    holds, fails = all(x > least for x in apart), all(x < least for x in apart)
    word = "holds" if holds else "does not hold" if fails else "undecided"
    return f"{word}: {spread(apart, sign='+')}"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard deviation as text."""
    if not values:
        return "–"
    return f"{fmean(values):{sign}.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
