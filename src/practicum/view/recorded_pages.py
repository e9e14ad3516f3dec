"""What the record of a run says of one session, one row and one step, as the page shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from practicum.dataplane.fields import FIELDS
from practicum.records.json_files import read_mapping
from practicum.records.read_record import Record, RecordedRow, RowSummary, StageSpan
from practicum.records.record_files import TRACED
from practicum.view.token_texts import TokenTexts

TOP_K = 8
"""Most likely tokens that are sent of each place."""
NEIGHBOURS = 8
"""Steps before and after one whose stages may run at the same time."""
MEANWHILE = 0.01
"""Part of a step's time by which a stage of another one must overlap: clocks of machines differ."""
_STUDENT = ("learner_logprobs", "old_logprobs", "plain_logprobs", "rollout_logprobs")
"""Columns that hold the student's logprobs, the best first."""


def session_rows(record: Record, step: int, prompt: int, session: int) -> list[RowSummary]:
    """The recorded trajectories of a session."""
    return [row for row in record.rows(step) if row.key[:2] == (prompt, session)]


def trajectory_tree(record: Record, rows: Sequence[RowSummary]) -> list[dict[str, Any]]:
    """Each trajectory of a session: its counts, what it weighs, and what it shares with an earlier one."""
    found: list[dict[str, Any]] = []
    sequences: list[list[int]] = []
    for summary in rows:
        row = record.row(summary.step, summary.key)
        assert row is not None
        ids = [*_list(row, "prompt_ids"), *_list(row, "response_ids")]
        shared = [_common(ids, other) for other in sequences]
        best = max(range(len(shared)), key=shared.__getitem__, default=None)
        sequences.append(ids)
        found.append(
            {
                "trajectory": summary.key.trajectory,
                **_summary(summary),
                "parent": None if best is None or not shared[best] else rows[best].key.trajectory,
                "shared": 0 if best is None else shared[best],
                "share": _sum(row.columns.get("share")),
                "advantage": _mean(row.columns.get("advantages"), row.columns.get("response_mask")),
            }
        )
    return found


def token_page(
    record: Record, texts: TokenTexts | None, step: int, key: tuple[int, int, int]
) -> dict[str, Any] | None:
    """A row token by token: every column with a value for each response token, and both top-k."""
    row = record.row(step, key)
    if row is None:
        return None
    response = _list(row, "response_ids")
    columns = _token_columns(row, len(response))
    return {
        "step": step,
        "key": list(key),
        "summary": _summary(row.summary),
        "prompt": _texts(texts, _list(row, "prompt_ids")),
        "tokens": _texts(texts, response),
        "mask": row.columns.get("response_mask") or [1] * len(response),
        "columns": columns,
        "about": {name: _about(name) for name in columns},
        "rules": row.rules,
        "stages": row.stages,
        "top_k": {who: found for who in ("teacher", "student") if (found := _top_k(row, who, texts))},
    }


def step_page(record: Record | None, run: Path, step: int) -> dict[str, Any]:
    """A step: its stages as every process ran them, what ran of other steps meanwhile, and the plan."""
    spans = [] if record is None else [asdict(span) for span in stages_around(record, step)]
    return {"step": step, "spans": spans, "plan": read_mapping(run / "plan.json") or None}


def stages_around(record: Record, step: int) -> list[StageSpan]:
    """The stages of a step, and those of its neighbours that ran at the same time, as with a lag."""
    own = record.stages(step)
    if not own:
        return []
    began, ended = min(span.began for span in own), max(_end(span) for span in own)
    least = MEANWHILE * (ended - began)
    near = [one for one in range(step - NEIGHBOURS, step + NEIGHBOURS + 1) if one != step]
    others = [
        span
        for one in near
        for span in record.stages(one)
        if min(_end(span), ended) - max(span.began, began) > least
    ]
    return [*own, *others]


def _end(span: StageSpan) -> float:
    return span.began + span.seconds


def _summary(row: RowSummary) -> dict[str, Any]:
    return {**asdict(row.tags), "step": row.step, "trained": row.trained, "update": row.update}


def _token_columns(row: RecordedRow, length: int) -> dict[str, list[Any]]:
    """Columns with one number for each response token, the KL to the teacher among them."""
    found = {
        name: values
        for name, values in row.columns.items()
        if isinstance(values, list)
        and len(values) == length
        and name not in ("response_ids", "response_mask")
        and all(value is None or isinstance(value, int | float) for value in values)
    }
    student = next((found[name] for name in _STUDENT if name in found), None)
    teacher = found.get("teacher_logprobs")
    if student is not None and teacher is not None and "teacher_kl" not in found:
        found["teacher_kl"] = [
            None if s is None or t is None else s - t for s, t in zip(student, teacher, strict=True)
        ]
    return found


def _about(name: str) -> str:
    return FIELDS[name].about if name in FIELDS else TRACED.get(name, "")


def _top_k(row: RecordedRow, who: str, texts: TokenTexts | None) -> list[list[Any]] | None:
    """The most likely tokens at each place: text, id and logprob."""
    ids, logprobs = row.columns.get(f"{who}_topk_ids"), row.columns.get(f"{who}_topk_logprobs")
    if not ids or not logprobs:
        return None
    found = []
    for at, values in zip(ids, logprobs, strict=True):
        known = [(number, value) for number, value in zip(at, values, strict=True) if value is not None]
        pairs = sorted(known, key=lambda pair: -pair[1])[:TOP_K]
        named = _texts(texts, [number for number, _ in pairs])
        found.append([token | {"logprob": value} for token, (_, value) in zip(named, pairs, strict=True)])
    return found


def _texts(texts: TokenTexts | None, ids: Sequence[int]) -> list[dict[str, Any]]:
    if texts is None:
        return [{"id": number, "text": f"<{number}>", "special": False} for number in ids]
    return texts(ids)


def _list(row: RecordedRow, name: str) -> list[Any]:
    value = row.columns.get(name)
    return value if isinstance(value, list) else []


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _sum(values: Any) -> float | None:
    known = [value for value in values or () if value is not None]
    return math.fsum(known) if known else None


def _mean(values: Any, mask: Any) -> float | None:
    if not isinstance(values, list) or not isinstance(mask, list):
        return None
    known = [value for value, own in zip(values, mask, strict=False) if own and value is not None]
    return math.fsum(known) / len(known) if known else None
