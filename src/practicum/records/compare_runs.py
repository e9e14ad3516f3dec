"""Two runs side by side: recipe keys that differ, and the first step, field and row whose numbers do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key
from practicum.errors import PracticumError
from practicum.recipe.text.origins import differences
from practicum.records.json_files import read_rows
from practicum.records.read_record import Record, RecordedRow, RowSummary, require_run

NOT_COMPARED = re.compile(
    r"time/.*|.*/tokens_per_second|teacher/.*/(seconds|wakes)|teachers/hidden|balance/.*|padding/.*|cluster/.*"
)
"""Metrics that the clock, the number of ranks or where a model lives makes."""
_TAGS = ("status", "finish", "prompt_tokens", "response_tokens", "sampled_tokens", "reward", "reward_parts")
_ORDER = {name: place for place, name in enumerate(FIELDS)}


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values that should be one. `key` and `token`, its place in the response, are None for a metric."""

    step: int
    field: str
    one: Any
    two: Any
    key: Key | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two runs. Recipe keys by name: the two values, None where there is no such key."""

    runs: tuple[Path, Path]
    recipe: dict[str, tuple[Any, Any]]
    first: Difference | None
    """The first number that differs."""
    also: list[str] = field(default_factory=list)
    """Metrics that differ in the same step."""
    steps: int = 0
    """Steps that were compared and are equal."""
    rows: int = 0
    """Recorded rows of theirs that were compared."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, in sentences."""


def compare_runs(one: Path, two: Path) -> Comparison:
    """Compare two run folders; one that is none is a PracticumError.

    In each step the recorded rows come before the metrics, and fields in the order in which stages write
    them, so that the first difference is the nearest to its cause. Times are not compared.
    """
    runs = one, two
    recipe = dict(differences(_recipe(one), _recipe(two)))
    records = Record(one), Record(two)
    metrics = _metrics(one), _metrics(two)
    notes = _notes(runs, records)
    equal = rows = 0
    for step in sorted(metrics[0].keys() | metrics[1].keys()):
        a, b = (by_step.get(step) for by_step in metrics)
        if a is None or b is None:
            one_has, two_has = ("no such step" if line is None else "a step more" for line in (a, b))
            first = Difference(step, "step", one_has, two_has)
            return Comparison(runs, recipe, first, [], equal, rows, notes)
        pairs = _pairs(*(record.rows(step) for record in records))
        first = first_in_rows(step, pairs, *records) or _first_in_tags(step, pairs)
        differing = [d for d in _compare(step, a, b) if _is_compared(d)]
        if first is not None or differing:
            first = first or differing[0]
            also = [d.field for d in differing if d is not first]
            return Comparison(runs, recipe, first, also, equal, rows, notes)
        equal, rows = equal + 1, rows + len(pairs)
    return Comparison(runs, recipe, None, [], equal, rows, notes)


def comparison_text(found: Comparison) -> str:
    """A comparison for people."""
    lines = []
    if found.recipe:
        width = max(map(len, found.recipe))
        lines.append("recipe keys that differ:")
        lines += [f"  {key:<{width}}  {_short(a)} → {_short(b)}" for key, (a, b) in found.recipe.items()]
    else:
        lines.append("the recipes are equal")
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    compared = f"{steps} and {found.rows} recorded rows{' before it' if found.first else ''} are equal"
    if (first := found.first) is None:
        lines.append(f"the numbers are equal: {compared.removesuffix(' are equal')}")
    else:
        token = "" if first.token is None else f", token {first.token} of the response"
        names = [str(run) for run in found.runs]
        width = max(map(len, (*names, "field")))
        lines.append(f"the numbers differ, first in step {first.step}:")
        if first.key is not None:
            lines.append(f"  {'row':<{width}}  {first.key}")
        lines.append(f"  {'field':<{width}}  {first.field}{token}")
        values = zip(names, (first.one, first.two), strict=True)
        lines += [f"  {name:<{width}}  {_short(value)}" for name, value in values]
        if found.also:
            more = f" and {len(found.also) - 8} more" if len(found.also) > 8 else ""
            lines.append(f"  metrics of this step that differ: {', '.join(found.also[:8])}{more}")
        lines.append(f"  {compared}" if found.steps else "  there is no step before it")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _recipe(run: Path) -> dict[str, Any]:
    require_run(run)
    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        recipe = None
    if not isinstance(recipe, dict):
        raise PracticumError(f"{run}/recipe.yaml can't be read: the run has no recipe to compare")
    return recipe


def _metrics(run: Path) -> dict[int, dict[str, Any]]:
    # The last line of a run that was killed, or is writing it, is left out.
    return {line["step"]: line for line in read_rows(run / "metrics.jsonl") if "step" in line}


def _notes(runs: tuple[Path, Path], records: tuple[Record, Record]) -> list[str]:
    notes = [
        f"{run} has no recorded rows: only metrics are compared (track.record records them)"
        for run, record in zip(runs, records, strict=True)
        if not record.rows()
    ]
    if not notes:
        keys = [{(row.step, row.key) for row in record.rows()} for record in records]
        notes += [
            f"{len(mine - other)} recorded rows are in {run} alone and are not compared"
            for run, mine, other in zip(runs, keys, reversed(keys), strict=True)
            if mine - other
        ]
    return notes + [problem for record in records for problem in record.problems]


def first_in_rows(
    step: int, pairs: Sequence[tuple[RowSummary, RowSummary]], one: Record, two: Record
) -> Difference | None:
    """The first difference in the columns that two records have in common of these rows."""
    rows = [
        (one.row(a.step, a.key), two.row(b.step, b.key))
        for a, b in pairs
        if one.texts(a) != two.texts(b)  # equal text is the usual case, and quick to see
    ]
    both = [(a, b) for a, b in rows if a is not None and b is not None]
    names = dict.fromkeys(name for a, b in both for name in a.columns if name in b.columns)
    for name in sorted(names, key=lambda name: _ORDER.get(name, len(_ORDER))):
        for a, b in both:
            if (found := _first_in_column(step, name, a, b)) is not None:
                return found
    return None


def _pairs(one: Sequence[RowSummary], two: Sequence[RowSummary]) -> list[tuple[RowSummary, RowSummary]]:
    others = {row.key: row for row in two}
    return [(row, others[row.key]) for row in one if row.key in others]


def _first_in_tags(step: int, pairs: Sequence[tuple[RowSummary, RowSummary]]) -> Difference | None:
    found = (difference for a, b in pairs for difference in _compare(step, _tags(a), _tags(b), a.key))
    return next(found, None)


def _tags(row: RowSummary) -> dict[str, Any]:
    return {name: getattr(row.tags, name) for name in _TAGS}


def _first_in_column(step: int, name: str, one: RecordedRow, two: RecordedRow) -> Difference | None:
    a, b = one.columns.get(name), two.columns.get(name)
    if a == b or name not in one.columns or name not in two.columns:
        return None
    key = one.summary.key
    if not isinstance(a, list) or not isinstance(b, list):
        return Difference(step, name, a, b, key)
    for token, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return Difference(step, name, x, y, key, token)
    return Difference(step, name, f"{len(a)} tokens", f"{len(b)} tokens", key)


def _compare(
    step: int, one: Mapping[str, Any], two: Mapping[str, Any], key: Key | None = None
) -> Iterator[Difference]:
    """Values of one name that differ; NaN is equal to NaN."""
    for name in dict.fromkeys([*one, *two]):
        a, b = one.get(name), two.get(name)
        if a != b and not (a != a and b != b):
            yield Difference(step, name, a, b, key)


def _is_compared(found: Difference) -> bool:
    """Whether a metric should be equal in both runs; one may evaluate after other steps than the other."""
    is_extra = found.field.startswith("eval/") and (found.one is None or found.two is None)
    return not is_extra and not NOT_COMPARED.fullmatch(found.field)


def _short(value: Any) -> str:
    if isinstance(value, dict):  # a section that one recipe has: what is not set says nothing
        value = {name: one for name, one in value.items() if one is not None}
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 100 else f"{text[:99]}…"
