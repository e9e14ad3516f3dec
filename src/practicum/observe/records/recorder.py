"""Writes one process's part of a run's record: rows with their columns, and the stages that ran here."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.store_files import read_rows
from practicum.errors import PracticumError
from practicum.observe.records.read_record import StageSpan
from practicum.observe.records.record_files import HEADER, RecordPlace, columns_file

WIDE = 64
"""Columns with more numbers than this for a token, and objects, are only in a record of all rows."""
_DEFAULTS = {f.name: f.default for f in fields(Tags)}
SAMPLED = tuple(name for name in _DEFAULTS if name not in ("step", "recorded", "trace"))
"""Tags of a row that the rollout sets."""
SCORED = ("status", "reward", "reward_parts", "failure")
"""Tags that change when a row is scored."""


class Recorder:
    """Appends to the two files of one process. Without a place it records nothing. What was added is in the
    files when a call returns. A file that can't be written is a PracticumError. Safe from any thread."""

    def __init__(self, place: RecordPlace | None = None) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._has_begun = False
        self._spans: dict[tuple[int, str, str], StageSpan] = {}
        self._in_flight = Counter[tuple[int, str, str]]()

    @property
    def records(self) -> bool:
        return self.place is not None

    def add(
        self,
        stage: str,
        batch: BatchRef,
        columns: Mapping[str, Column],
        tags: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Record columns and named tags of those rows of a batch that are recorded, and `more` of all."""
        if self.place is None:
            return
        by_step: dict[int, list[int]] = {}
        for i, row_tags in enumerate(batch.tags):
            if row_tags.recorded:
                by_step.setdefault(row_tags.step, []).append(i)
        if not self.place.everything:
            columns = {name: column for name, column in columns.items() if not _is_large(column)}
        for step, indices in by_step.items():
            line: dict[str, Any] = {"step": step, "stage": stage, "rows": [batch.keys[i] for i in indices]}
            if tags:
                values = [[(name, getattr(batch.tags[i], name)) for name in tags] for i in indices]
                line["tags"] = [{n: x for n, x in row if x != _DEFAULTS[n]} for row in values]
            blocks = [save(_row_arrays(columns, i)) for i in indices] if columns else []
            with self._lock:
                if blocks:
                    begin = self._append(columns_file(self.place.lines), b"".join(blocks))
                    line["at"] = list(accumulate(map(len, blocks), initial=begin))
                    line["sums"] = [zlib.crc32(block) for block in blocks]
                self._append(self.place.lines, _json_line(line | more))

    def restore(self, path: Path) -> None:
        """Record the rows of a saved store again: the record may have been cut back to before they came."""
        for batch, columns in read_rows(path) if self.place is not None else ():
            for writer in sorted({FIELDS[name].writer for name in columns}):
                written = {name: c for name, c in columns.items() if FIELDS[name].writer == writer}
                self.add(writer, batch, written, SAMPLED)

    @contextmanager
    def span(self, stage: str, step: int, part: str = "", rows: int = 0) -> Iterator[None]:
        """Record that a stage, or a part of it such as one teacher, runs here inside; step 0 is left out.
        Calls that overlap are one span."""
        if self.place is None or not step:
            yield
            return
        name = step, stage, part
        with self._lock:
            if name not in self._spans:
                self._spans[name] = StageSpan(*name, self.place.role, self.place.number, time.time())
            span = self._spans[name]
            span.calls += 1
            span.rows += rows
            self._in_flight[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight[name] -= 1
                if not self._in_flight[name]:
                    del self._spans[name], self._in_flight[name]
                    span.seconds = time.time() - span.began
                    self._append(self.place.lines, _json_line(asdict(span)))

    def _append(self, path: Path, data: bytes) -> int:
        """Append to a file and return where the data begins. The first call writes the header."""
        assert self.place is not None
        try:
            if not self._has_begun:
                path.parent.mkdir(parents=True, exist_ok=True)
                with self.place.lines.open("ab+") as file:
                    end = file.tell()
                    file.seek(max(0, end - 1))
                    if not end:
                        file.write(_json_line(HEADER))
                    elif file.read(1) != b"\n":  # its writer was killed in the middle of a line
                        file.write(b"\n")
                self._has_begun = True
            with path.open("ab") as file:
                begin = file.tell()
                file.write(data)
        except OSError as error:
            raise PracticumError(
                f"{path} can't be written: {error.strerror}.\n"
                "  → make room, or record less: --set track.record=none records no rows"
            ) from error
        return begin


NOT_RECORDED = Recorder()


def _is_large(column: Column) -> bool:
    if isinstance(column, list):
        mappings = [row for row in column if isinstance(row, Mapping)]
        return any(isinstance(item, Tensor) for row in mappings for item in row.values())
    return isinstance(column, Ragged) and prod(column.trailing) > WIDE


def _json_line(data: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(data, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace")


def _row_arrays(columns: Mapping[str, Column], place: int) -> dict[str, np.ndarray]:
    """Return one row of all columns. Of a column of mappings, each entry is an array `name.key`."""
    arrays: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        value = column.rows[place] if isinstance(column, Ragged) else column[place]
        named = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {}
        for key, item in (named or {name: value}).items():
            if isinstance(item, Tensor):
                item = item.detach().cpu()
                arrays[key] = (item.float() if item.dtype == torch.bfloat16 else item).contiguous().numpy()
            elif isinstance(item, list):
                arrays[key] = np.array([-1 if n is None else n for n in item], dtype=np.int64)
    return arrays
