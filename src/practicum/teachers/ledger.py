"""The ledger: shares of each teacher and domain in a step's prompts, tokens, loss, gradient and update.

A domain with short responses may have many prompts and hardly any gradient. The ledger shows it, and
`route.shares` corrects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.learning.update_batch import TeacherSums
from practicum.learning.update_shares import PartShares

STARVED = 0.1
"""Fraction of the target share below which a teacher causes a warning."""

SUMMED = frozenset({"prompts", "tokens", "seconds", "wakes"})
"""Measures that are summed over the steps of a run. Others are averaged."""

DIVIDED = frozenset({"loss_share", "gradient_share", "update_share"})
"""Shares of a whole, which are 0 in steps without the name."""

Pair = tuple[str, str]
"""A teacher and a domain."""


@dataclass(frozen=True, slots=True)
class TeacherMeasures:
    """Measures of an update: sums by (teacher, domain), and optionally their gradients."""

    pairs: Sequence[Pair]
    sums: TeacherSums
    parts: Sequence[Pair] = ()
    shares: PartShares | None = None
    """Gradients of the `parts`."""

    def products(self, which: int) -> dict[Pair, float]:
        """Return the dot products of the gradients of teachers (which = 0) or domains (1)."""
        found: dict[Pair, float] = {}
        for one, row in zip(self.parts, self.shares.gram if self.shares else [], strict=False):
            for other, dot in zip(self.parts, row, strict=True):
                pair = one[which], other[which]
                found[pair] = found.get(pair, 0.0) + dot
        return found


def pair_of(tags: Tags) -> Pair:
    return tags.teacher or "", tags.domain


Lines = dict[str, dict[str, float]]
"""Measures of each teacher, or of each domain, by name."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger of a step. Measures that were not taken are absent."""

    teachers: Lines
    domains: Lines
    other: Mapping[str, float] = field(default_factory=dict)
    """Unattributed share of the update, and cosines between teachers' gradients, by metric."""

    def metrics(self) -> dict[str, float]:
        return dict(self.other) | {
            f"{kind}/{name}/{what}": value
            for kind, lines in (("teacher", self.teachers), ("domain", self.domains))
            for name, line in lines.items()
            for what, value in line.items()
        }

    def starved(self, shares: Mapping[str, float] | None) -> str | None:
        """Return a warning about teachers whose gradient share is far below the target, or None. The target
        is the recipe's, or the teacher's share of the prompts."""
        parts = []
        for name, line in self.teachers.items():
            share = line.get("gradient_share")
            target = (shares or {}).get(name, line["prompts_share"])
            if share is not None and share < STARVED * target:
                parts.append(f"{name} has {share:.1%} of the gradient, and its target is {target:.1%}")
        if not parts:
            return None
        advice = "set route.shares to fix each teacher's share of the loss"
        if shares is not None:
            advice = "the student already agrees with it, or it needs a larger share in route.shares"
        return f"{'; '.join(parts)}: {advice}"


def make_ledger(
    batch: BatchRef,
    measured: TeacherMeasures,
    seconds: Mapping[str, float],
    wakes: Mapping[str, int],
) -> Ledger:
    teachers, domains = (_lines(batch, measured, which) for which in (0, 1))
    for name, line in teachers.items():
        line["seconds"] = seconds.get(name, 0.0)
        if name in wakes:
            line["wakes"] = wakes[name]
    rest = measured.shares.rest if measured.shares else {}
    other = {f"update/{name}": share for name, share in rest.items()}
    dots = measured.products(0)
    for (one, two), dot in dots.items():
        size = (dots[one, one] * dots[two, two]) ** 0.5
        if one < two and size > 0:
            other[f"cosine/{one}/{two}"] = dot / size
    return Ledger(teachers, domains, other)


def totals(rows: Iterable[Mapping[str, float]]) -> Lines:
    """Aggregate the metrics of all steps into the ledger of a run: sums of counts, means, and renormalised
    shares.

    The shares of all teachers, and of all domains, add up to one. Shares of the update are of the clipped
    gradients, so that momentum and decay have the rest.
    Keys are "teacher <name>" and "domain <domain>".
    """
    gathered: dict[str, dict[str, list[float]]] = {}
    divided: dict[tuple[str, str], int] = {}
    for row in rows:
        measured: set[tuple[str, str]] = set()
        asked = sum(v for k, v in row.items() if k.startswith("teacher/") and k.endswith("/update_share"))
        clipped = 1 + row.get("update/clipping", 0.0) / asked if asked else 1.0
        for metric, value in row.items():
            kind, _, rest = metric.partition("/")
            name, _, what = rest.rpartition("/")
            if kind in ("teacher", "domain") and name:
                value *= clipped if what == "update_share" else 1.0
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


def _lines(batch: BatchRef, measured: TeacherMeasures, which: int) -> Lines:
    """Return one line per teacher (which = 0) or domain (1)."""
    dots = measured.products(which)
    norms = {one: max(dot, 0.0) ** 0.5 for (one, two), dot in dots.items() if one == two}
    updates: dict[str, float] = {}
    for pair, share in zip(measured.parts, measured.shares.shares if measured.shares else [], strict=False):
        updates[pair[which]] = updates.get(pair[which], 0.0) + share
    rows: dict[str, list[tuple[Key, Tags]]] = {}
    for key, tags in batch:
        rows.setdefault(pair_of(tags)[which], []).append((key, tags))
    prompts = {name: len({key.prompt for key, _ in own}) for name, own in rows.items()}
    tokens = {name: sum(tags.sampled_tokens for _, tags in own) for name, own in rows.items()}
    summed: dict[str, tuple[int, dict[str, float]]] = {}  # tokens and sums over the pairs of a name
    for group, sums in measured.sums.sums.items():
        name = measured.pairs[group][which]
        count, before = summed.get(name, (0, {}))
        merged = {what: before.get(what, 0.0) + value for what, value in sums.items()}
        summed[name] = (count + measured.sums.tokens[group], merged)
    weight = sum(sums.get("weight", 0.0) for _, sums in summed.values())
    lines = {}
    for name, own in sorted(rows.items()):
        line = {
            "prompts": prompts[name],
            "prompts_share": prompts[name] / sum(prompts.values()),
            "tokens": tokens[name],
            "tokens_share": tokens[name] / max(1, sum(tokens.values())),
        }
        rewards = {key[:2]: tags.reward for key, tags in own if tags.reward is not None}
        if rewards:
            line["reward"] = fmean(rewards.values())
        if name in summed:
            line |= _means(*summed[name], weight)
        if (
            sum(norms.values()) > 0 and name in norms
        ):  # measured on one mini-batch, which may lack some teachers
            line["gradient_share"] = norms[name] / sum(norms.values())
        if name in updates:
            line["update_share"] = updates[name]
        lines[name] = line
    return lines


def _means(tokens: int, sums: Mapping[str, float], weight: float) -> dict[str, float]:
    whats = ("kl", "overlap", "entropy", "entropy_gap", "coverage")
    line = {what: sums[what] / tokens for what in whats if what in sums}
    if sums.get("coverage"):  # the teacher says nothing of the other tokens
        line["kl"] = sums["kl"] / sums["coverage"]
        if "shared_mass" in sums:
            line["shared_mass"] = sums["shared_mass"] / sums["coverage"]
    if weight > 0:
        line["loss_share"] = sums["weight"] / weight
    if sums.get("weight", 0.0) > 0:
        line["loss"] = sums["loss"] / sums["weight"]
    return line
