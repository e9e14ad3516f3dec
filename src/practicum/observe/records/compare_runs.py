"""Two runs side by side: recipe keys, last scores, and the first step, field and row whose numbers differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key
from practicum.errors import PracticumError, RecipeError
from practicum.observe.records.json_files import read_rows
from practicum.observe.records.read_record import Record, RecordedRow, RowSummary
from practicum.observe.records.record_files import TRACED
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import differences

NOT_COMPARED = re.compile(
    r"time/.*|.*/tokens_per_second|teacher/.*/(seconds|wakes)|teachers/overlap_fraction|shared/.*|padding/.*|cluster/.*"
)
"""Metrics that the clock, the number of ranks or where a model lives makes."""
_EXPLAINED = {
    "step": ("train.steps", "eval.stop_at"),
    "train/lr": ("train.lr", "train.schedule", "train.warmup_steps", "train.final_lr", "train.steps"),
    "rollout/sessions": ("rollout.samples", "train.prompts", "refills"),
    "advantage/kl_coefficient": ("algorithm.kl",),
    "eval": ("eval",),
}
"""Metrics, or the first words of their names, that only repeat these keys of the recipe."""
_SCORES = re.compile(r"reward/mean|eval/(greedy|mean@\d+|pass@\d+)|(train|advantage)/(teacher_)?kl(_reward)?")
_TAGS = ("status", "finish", "prompt_tokens", "response_tokens", "sampled_tokens", "reward", "reward_parts")
_ORDER = {name: place for place, name in enumerate((*FIELDS, *TRACED))}


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values that should be equal. `key` and `token`, a place in the response, are None for a metric."""

    step: int
    field: str
    one: Any
    two: Any
    key: Key | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two runs.

    `recipe` has the two values of each key that differs, None where there is no such key. `scores` has the
    last rewards, evaluations and KL of both. `also` names the metrics that differ in the step of the first
    difference, and `explained` those that differ because a key does, which are no difference. `steps` are
    equal in both runs. `rows` were compared, in these and in the step that differs, where `differing` do.
    """

    runs: tuple[Path, Path]
    recipe: dict[str, tuple[Any, Any]]
    scores: dict[str, tuple[float | None, float | None]]
    first: Difference | None
    also: list[str]
    explained: list[str]
    steps: int
    rows: int
    differing: int
    notes: list[str]
    """Sentences on what could not be compared."""

    @property
    def sentence(self) -> str:
        equal = f"{self.steps} {'step' if self.steps == 1 else 'steps'}"
        if self.first is None:
            return f"the numbers are equal: {equal} and {self.rows} recorded rows"
        rows = (
            f"; {self.differing} of {self.rows} recorded rows that were compared differ" if self.rows else ""
        )
        return f"the numbers differ, first in step {self.first.step}, after {equal} that are equal{rows}"


def compare_runs(one: Path, two: Path) -> Comparison:
    """Compare two run folders. Raise PracticumError if one is no run folder.

    In each step the recorded rows come before the metrics, and fields in the order in which stages write
    them, so that the first difference is the nearest to its cause. Times are not compared, and metrics that
    repeat a key of the recipe only if that is equal.
    """
    runs, records = (one, two), (Record(one), Record(two))
    recipe = dict(differences(_recipe(one), _recipe(two)))
    # The last line of a run that was killed, or is writing it, is left out.
    lines = [read_rows(run / "metrics.jsonl") for run in runs]
    metrics = [{line["step"]: line for line in rows if "step" in line} for rows in lines]
    first, also, explained, equal, rows, differing = None, list[str](), dict[str, None](), 0, 0, 0
    for step in sorted(metrics[0].keys() | metrics[1].keys()):
        a, b = (by_step.get(step) for by_step in metrics)
        if a is None or b is None:
            one_has, two_has = ("no such step" if line is None else "a step more" for line in (a, b))
            more = Difference(step, "step", one_has, two_has)
            first = None if _is_explained(more, recipe) else more
            explained |= {} if first else {f"steps from {step} on, which one run has": None}
            break
        others = {row.key: row for row in records[1].rows(step)}
        pairs = [(row, others[row.key]) for row in records[0].rows(step) if row.key in others]
        in_tags = [d for x, y in pairs for d in _compare(step, _tags(x), _tags(y), x.key)]
        in_metrics = [d for d in _compare(step, a, b) if _is_compared(d)]
        explained |= {d.field: None for d in in_metrics if _is_explained(d, recipe)}
        in_metrics = [d for d in in_metrics if d.field not in explained]
        first = next(filter(None, [first_in_rows(step, pairs, *records), *in_tags, *in_metrics]), None)
        rows += len(pairs)
        if first is not None:
            also = [d.field for d in in_metrics if d is not first]
            other_tags = {d.key for d in in_tags}
            differing = sum(
                x.key in other_tags or first_in_rows(step, [(x, y)], *records) is not None for x, y in pairs
            )
            break
        equal += step > 0  # step 0 is the evaluation before training
    notes = [
        f"{run} has no recorded rows: only metrics are compared (track.record records them)"
        for run, record in zip(runs, records, strict=True)
        if not record.rows()
    ]
    if not notes:
        keys = [{(row.step, row.key) for row in record.rows()} for record in records]
        alone = [(run, len(a - b)) for run, a, b in zip(runs, keys, reversed(keys), strict=True) if a - b]
        notes += [f"{n} recorded rows are in {run} alone and are not compared" for run, n in alone]
    notes += [problem for record in records for problem in record.problems]
    return Comparison(
        runs, recipe, _last_scores(*metrics), first, also, list(explained), equal, rows, differing, notes
    )


def _last_scores(
    one: Mapping[int, Mapping[str, Any]], two: Mapping[int, Mapping[str, Any]]
) -> dict[str, tuple[float | None, float | None]]:
    """Return the last value of each score that both runs, or one of them, have."""
    last: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for values, by_step in zip(last, (one, two), strict=True):
        for _, line in sorted(by_step.items()):
            values |= {name: value for name, value in line.items() if _SCORES.fullmatch(name)}
    return {name: (last[0].get(name), last[1].get(name)) for name in sorted(last[0].keys() | last[1].keys())}


def _is_explained(found: Difference, recipe: Mapping[str, Any]) -> bool:
    """Return True if a metric differs only because it repeats a recipe key that differs."""
    keys = _EXPLAINED.get(found.field, _EXPLAINED.get(found.field.partition("/")[0], ()))
    return any(name == key or name.startswith(f"{key}.") for key in keys for name in recipe)


def comparison_text(found: Comparison) -> str:
    """Return a comparison as `practicum diff` prints it."""
    lines = ["recipe keys that differ:" if found.recipe else "the recipes are equal"]
    lines += _aligned({key: f"{_short(a)} → {_short(b)}" for key, (a, b) in found.recipe.items()})
    lines += _score_lines(found)
    lines.append(found.sentence)
    if found.explained:
        lines.append(f"explained by recipe keys: {', '.join(found.explained)}")
    if (first := found.first) is not None:
        token = "" if first.token is None else f", token {first.token} of the response"
        row = {} if first.key is None else {"row": str(first.key)}
        row |= {"field": f"{first.field}{token}"}
        row |= {str(run): _short(x) for run, x in zip(found.runs, (first.one, first.two), strict=True)}
        if found.also:
            row["metrics too"] = ", ".join(found.also[:8]) + (", …" if len(found.also) > 8 else "")
        lines += _aligned(row)
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _score_lines(found: Comparison) -> list[str]:
    """Return a line for each score with the run that has the better one. Less KL is not better or worse."""
    table = [["last values", *map(str, found.runs), "better"]]
    for name, values in found.scores.items():
        better = ""
        if not name.endswith(("kl", "kl_reward")) and None not in values and values[0] != values[1]:
            better = str(found.runs[values.index(max(value for value in values if value is not None))])
        table.append([name, *("–" if value is None else f"{value:.4g}" for value in values), better])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
    return ["  ".join(row).rstrip() for row in cells] if found.scores else []


def _aligned(named: Mapping[str, str]) -> list[str]:
    width = max(map(len, named), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in named.items()]


def _recipe(run: Path) -> dict[str, Any]:
    try:
        recipe = yamlfile.parse((run / "recipe.yaml").read_text(encoding="utf-8"), "recipe.yaml").data
    except (OSError, ValueError, RecipeError):
        recipe = None
    if not isinstance(recipe, dict):
        raise PracticumError(f"{run}/recipe.yaml can't be read: the run has no recipe to compare")
    return recipe


def first_in_rows(
    step: int, pairs: Sequence[tuple[RowSummary, RowSummary]], one: Record, two: Record
) -> Difference | None:
    """Return the first difference in the columns that two records have in common of these rows."""
    # Equal bytes are the usual case, and quick to see.
    unequal = [(a, b) for a, b in pairs if (data := a.data()) is None or data != b.data()]
    rows = [(one.row(a.step, a.key), two.row(b.step, b.key)) for a, b in unequal]
    both = [(a, b) for a, b in rows if a is not None and b is not None]
    names = dict.fromkeys(name for a, b in both for name in a.columns if name in b.columns)
    for name in sorted(names, key=lambda name: _ORDER.get(name, len(_ORDER))):
        for a, b in both:
            if (found := _first_in_column(step, name, a, b)) is not None:
                return found
    return None


def _first_in_column(step: int, name: str, one: RecordedRow, two: RecordedRow) -> Difference | None:
    a, b, key = one.columns.get(name), two.columns.get(name), one.summary.key
    if a is None or b is None or (a.shape == b.shape and a.tobytes() == b.tobytes()):
        return None
    if not a.shape or not b.shape:
        return Difference(step, name, a.tolist(), b.tolist(), key)
    for token, (x, y) in enumerate(zip(a, b, strict=False)):
        if x.tobytes() != y.tobytes():
            return Difference(step, name, x.tolist(), y.tolist(), key, token)
    return Difference(step, name, f"{len(a)} tokens", f"{len(b)} tokens", key)


def _tags(row: RowSummary) -> dict[str, Any]:
    return {name: getattr(row.tags, name) for name in _TAGS}


def _compare(
    step: int, one: Mapping[str, Any], two: Mapping[str, Any], key: Key | None = None
) -> Iterator[Difference]:
    """Yield the values of one name that differ. NaN is equal to NaN."""
    for name in dict.fromkeys([*one, *two]):
        a, b = one.get(name), two.get(name)
        if a != b and not (a != a and b != b):
            yield Difference(step, name, a, b, key)


def _is_compared(found: Difference) -> bool:
    """Return True if a metric should be equal in both runs. They may evaluate after different steps."""
    is_extra = found.field.startswith("eval/") and (found.one is None or found.two is None)
    return not is_extra and not NOT_COMPARED.fullmatch(found.field)


def _short(value: Any) -> str:
    if isinstance(value, dict):  # a section that one recipe has: what is not set says nothing
        value = {name: one for name, one in value.items() if one is not None}
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 100 else f"{text[:99]}…"
