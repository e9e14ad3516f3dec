"""Sessions, rows and steps of a run's record, as the page shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from practicum.dataplane.fields import FIELDS
from practicum.observe.records.read_record import Record, RecordedRow, RowSummary, StageSpan
from practicum.observe.records.record_files import TRACED
from practicum.observe.text import BYTE_LETTERS

TOP_K = 8
"""Most likely tokens that are sent of each place."""
NEIGHBOURS = 8
"""Steps before and after one whose stages may run at the same time."""
MEANWHILE = 0.01
"""Part of a step's time by which a stage of another one must overlap: clocks of machines differ."""
_STUDENT = ("learner_logprobs", "old_logprobs", "plain_logprobs", "rollout_logprobs")
"""Columns that hold the student's logprobs, the best first."""


class TokenTexts:
    """Texts of token ids, and which are special. Without a tokenizer, they are their numbers."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer, self._special, self._is_bytes = None, set[int](), False
        if path is not None:
            self._tokenizer = Tokenizer.from_file(str(path))
            added = self._tokenizer.get_added_tokens_decoder()
            self._special = {number for number, token in added.items() if token.special}
            decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
            self._is_bytes = '"ByteLevel"' in json.dumps(decoder)

    @classmethod
    def of_run(cls, run: Path) -> TokenTexts | None:
        """Return the texts of a run's own tokenizer, or of its export's or newest checkpoint's."""
        checkpoints = sorted((run / "checkpoints").glob("step-*/model/tokenizer.json"))
        paths = (run / "tokenizer.json", run / "export" / "tokenizer.json", *checkpoints[-1:])
        return next((cls(path) for path in paths if path.is_file()), None)

    def __call__(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return each token with its id, text and whether it is special."""
        return [{"id": i, "text": self._text(i), "special": i in self._special} for i in ids]

    def _text(self, number: int) -> str:
        token = None if self._tokenizer is None else self._tokenizer.id_to_token(number)
        if token is None:
            return f"<{number}>"
        if number in self._special:
            return token
        if not self._is_bytes:
            return token.replace("▁", " ")
        data = bytes(BYTE_LETTERS[c] for c in token if c in BYTE_LETTERS)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in data)


def trajectory_tree(record: Record, step: int, session: tuple[int, int]) -> list[dict[str, Any]]:
    """Return each trajectory of a session: counts, weights, and what it shares with an earlier one."""
    tree: list[dict[str, Any]] = []
    sequences: dict[int, list[int]] = {}
    for summary in record.rows(step):
        if summary.key[:2] != session or (row := record.row(step, summary.key)) is None:
            continue
        ids = [*_list(row, "prompt_ids"), *_list(row, "response_ids")]
        shared = {number: _common(ids, other) for number, other in sequences.items()}
        parent = max(shared, key=shared.__getitem__, default=None)
        sequences[summary.key.trajectory] = ids
        share = [x for x in _list(row, "share") if not math.isnan(x)]
        sampled = zip(_list(row, "advantages"), _list(row, "response_mask"), strict=False)
        advantages = [x for x, is_sampled in sampled if is_sampled and not math.isnan(x)]
        tree.append(
            {
                "trajectory": summary.key.trajectory,
                **_summary(summary),
                "parent": parent if parent is not None and shared[parent] else None,
                "shared": 0 if parent is None else shared[parent],
                "share": math.fsum(share) if share else None,
                "advantage": math.fsum(advantages) / len(advantages) if advantages else None,
            }
        )
    return tree


def token_page(record: Record, texts: TokenTexts, step: int, key: tuple[int, ...]) -> dict[str, Any] | None:
    """Return a row token by token: every column with a value for each response token, and both top-k."""
    row = record.row(step, key)
    if row is None:
        return None
    response = _list(row, "response_ids")
    columns = _token_columns(row, len(response))
    return {
        "step": step,
        "key": list(key),
        "summary": _summary(row.summary),
        "prompt": texts(_list(row, "prompt_ids")),
        "tokens": texts(response),
        "mask": _list(row, "response_mask") or [True] * len(response),
        "columns": columns,
        "about": {name: FIELDS[name].about if name in FIELDS else TRACED.get(name, "") for name in columns},
        "rules": row.rules,
        "stages": row.stages,
        "top_k": {who: best for who in ("teacher", "student") if (best := _top_k(row, who, texts))},
    }


def stages_around(record: Record, step: int) -> list[StageSpan]:
    """Return the stages of a step, and those of its neighbours that ran at the same time, as with a lag."""
    own = record.stages(step)
    if not own:
        return []
    began, ended = min(span.began for span in own), max(span.began + span.seconds for span in own)
    near = [number for number in range(step - NEIGHBOURS, step + NEIGHBOURS + 1) if number != step]
    others = [
        span
        for number in near
        for span in record.stages(number)
        if min(span.began + span.seconds, ended) - max(span.began, began) > MEANWHILE * (ended - began)
    ]
    return [*own, *others]


def _summary(row: RowSummary) -> dict[str, Any]:
    return {**asdict(row.tags), "step": row.step, "trained": row.trained, "update": row.update}


def _token_columns(row: RecordedRow, length: int) -> dict[str, list[Any]]:
    """Return the columns with one number for each response token, the KL to the teacher among them."""
    of_tokens = {
        name: values
        for name, values in row.columns.items()
        if values.shape == (length,) and name not in ("response_ids", "response_mask")
    }
    student = next((of_tokens[name] for name in _STUDENT if name in of_tokens), None)
    teacher = of_tokens.get("teacher_logprobs")
    if student is not None and teacher is not None:
        of_tokens.setdefault("teacher_kl", student - teacher)
    columns = {name: _numbers(values) for name, values in of_tokens.items()}
    if "version" in columns:
        columns["version"] = [None if version < 0 else version for version in columns["version"]]
    return columns


def _numbers(values: np.ndarray) -> list[Any]:
    """Return the entries as Python numbers. For a float32, it is the one with the shortest text."""
    return (values.astype(str).astype(np.float64) if values.dtype == np.float32 else values).tolist()


def _top_k(row: RecordedRow, who: str, texts: TokenTexts) -> list[list[Any]] | None:
    """Return the most likely tokens at each place: text, id and logprob."""
    ids, logprobs = row.columns.get(f"{who}_topk_ids"), row.columns.get(f"{who}_topk_logprobs")
    if ids is None or logprobs is None:
        return None
    places = []
    for at, values in zip(ids, logprobs, strict=True):
        order = [place for place in np.argsort(-values, kind="stable") if not np.isnan(values[place])][:TOP_K]
        best = zip(texts(at[order].tolist()), _numbers(values[order]), strict=True)
        places.append([token | {"logprob": value} for token, value in best])
    return places


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _list(row: RecordedRow, name: str) -> list[Any]:
    return row.columns[name].tolist() if name in row.columns else []
