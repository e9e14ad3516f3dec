"""The ledger: what each teacher and each domain had of a step, in prompts, tokens, loss and gradient.

A domain with short answers may have many prompts and next to none of the gradient; the ledger shows it, and
`route.shares` mends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.learning.teacher_sums import TeacherSums

STARVED = 0.1
"""A teacher below this part of its target share is warned about."""

SUMMED = frozenset({"prompts", "tokens", "seconds", "wakes"})
"""Numbers that add up over steps; of the others a run has the mean."""

DIVIDED = frozenset({"loss_share", "gradient_share"})
"""Shares of one whole per step: a name that a step does not have has none of it."""

Pair = tuple[str, str]
"""A teacher and a domain."""


@dataclass(frozen=True, slots=True)
class TeacherMeasures:
    """What an update measured of its rows: sums by (teacher, domain), and gradient norms where taken."""

    pairs: Sequence[Pair]
    sums: TeacherSums
    teacher_norms: Mapping[str, float] = field(default_factory=dict)
    domain_norms: Mapping[str, float] = field(default_factory=dict)


def pair_of(tags: Tags) -> Pair:
    """Whose row it is."""
    return tags.teacher or "", tags.domain


def ledger(
    batch: BatchRef,
    measured: TeacherMeasures,
    seconds: Mapping[str, float],
    wakes: Mapping[str, int],
) -> dict[str, float]:
    """Metrics teacher/<name>/… and domain/<domain>/… of a step; what was not measured is absent."""
    out: dict[str, float] = {}
    for part, which, norms in (
        ("teacher", 0, measured.teacher_norms),
        ("domain", 1, measured.domain_norms),
    ):
        lines = _lines(batch, measured, which)
        whole = sum(norms.values())
        for name, line in lines.items():
            if whole > 0 and name in norms:  # measured on one mini-batch, which may lack a name
                line["gradient_share"] = norms[name] / whole
            if part == "teacher":
                line["seconds"] = seconds.get(name, 0.0)
                if name in wakes:
                    line["wakes"] = wakes[name]
            out |= {f"{part}/{name}/{what}": value for what, value in line.items()}
    return out


def starved(metrics: Mapping[str, float], shares: Mapping[str, float] | None) -> str | None:
    """A sentence naming the teachers whose gradient is far below their target, else None.

    The target is the recipe's, or the teacher's share of the prompts.
    """
    found = []
    for metric, share in metrics.items():
        kind, name, what = (*metric.split("/"), "", "")[:3]
        if kind != "teacher" or what != "gradient_share":
            continue
        target = (shares or {}).get(name, metrics[f"teacher/{name}/prompts_share"])
        if share < STARVED * target:
            found.append(f"{name} has {share:.1%} of the gradient and a target of {target:.1%}")
    if not found:
        return None
    advice = "set route.shares to give each teacher its part of the loss"
    if shares is not None:
        advice = "its part of the loss is as set: the student agrees with it, or it needs a larger one"
    return f"{'; '.join(found)}: {advice}"


def totals(rows: Iterable[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The ledger of a whole run from its steps' metrics: sums of counts, means of the rest, shares anew.

    The shares of all teachers, and of all domains, add up to one.
    Keys are "teacher <name>" and "domain <domain>".
    """
    gathered: dict[str, dict[str, list[float]]] = {}
    divided: dict[tuple[str, str], int] = {}
    for row in rows:
        measured: set[tuple[str, str]] = set()
        for metric, value in row.items():
            kind, _, rest = metric.partition("/")
            name, _, what = rest.rpartition("/")
            if kind in ("teacher", "domain") and name:
                gathered.setdefault(f"{kind} {name}", {}).setdefault(what, []).append(value)
                measured.add((kind, what))
        for which in measured:
            divided[which] = divided.get(which, 0) + 1

    def total(name: str, what: str, values: list[float]) -> float:
        if what in SUMMED:
            return sum(values)
        return sum(values) / (divided[name.split()[0], what] if what in DIVIDED else len(values))

    lines = {
        name: {what: total(name, what, values) for what, values in line.items()}
        for name, line in sorted(gathered.items(), key=lambda item: (item[0].startswith("domain "), item[0]))
    }
    for kind in ("teacher", "domain"):
        for what in ("prompts", "tokens"):
            whole = sum(line[what] for name, line in lines.items() if name.startswith(f"{kind} "))
            for name, line in lines.items():
                if name.startswith(f"{kind} ") and whole:
                    line[f"{what}_share"] = line[what] / whole
    return lines


def _lines(batch: BatchRef, measured: TeacherMeasures, which: int) -> dict[str, dict[str, float]]:
    """One line per teacher (which = 0) or domain (1)."""
    rows: dict[str, list[tuple[Key, Tags]]] = {}
    for key, tags in batch:
        rows.setdefault(pair_of(tags)[which], []).append((key, tags))
    prompts = {name: len({key.prompt for key, _ in mine}) for name, mine in rows.items()}
    tokens = {name: sum(tags.sampled_tokens for _, tags in mine) for name, mine in rows.items()}
    summed = _summed(measured, which)
    weight = sum(sums.get("weight", 0.0) for _, sums in summed.values())
    lines = {}
    for name, mine in sorted(rows.items()):
        line = {
            "prompts": prompts[name],
            "prompts_share": prompts[name] / sum(prompts.values()),
            "tokens": tokens[name],
            "tokens_share": tokens[name] / max(1, sum(tokens.values())),
        }
        rewards = {key[:2]: tags.reward for key, tags in mine if tags.reward is not None}
        if rewards:
            line["reward"] = fmean(rewards.values())
        if name in summed:
            line |= _means(*summed[name], weight)
        lines[name] = line
    return lines


def _summed(measured: TeacherMeasures, which: int) -> dict[str, tuple[int, dict[str, float]]]:
    """Tokens and sums of each name, over its pairs."""
    out: dict[str, tuple[int, dict[str, float]]] = {}
    for group, sums in measured.sums.sums.items():
        name = measured.pairs[group][which]
        tokens, mine = out.get(name, (0, {}))
        merged = {what: mine.get(what, 0.0) + value for what, value in sums.items()}
        out[name] = (tokens + measured.sums.tokens[group], merged)
    return out


def _means(tokens: int, sums: Mapping[str, float], weight: float) -> dict[str, float]:
    line = {what: sums[what] / tokens for what in ("kl", "overlap", "entropy") if what in sums}
    if weight > 0:
        line["loss_share"] = sums["weight"] / weight
    if sums.get("weight", 0.0) > 0:
        line["loss"] = sums["loss"] / sums["weight"]
    return line
