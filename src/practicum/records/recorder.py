"""Writes one process's part of a run's record: rows with their columns, and the stages that ran here."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import PracticumError
from practicum.records.numbers_text import column_texts
from practicum.records.record_files import COLUMNS, HEADER, ROWS, STAGES, WIDE, RecordPlace

_DEFAULTS = {f.name: f.default for f in fields(Tags) if f.name not in ("step", "recorded", "trace")}


@dataclass(slots=True)
class _Span:
    """A stage under way in this process; calls that overlap are one span."""

    step: int
    stage: str
    part: str
    began: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    under_way: int = 0
    calls: int = 0
    rows: int = 0
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def line(self, place: RecordPlace) -> dict[str, Any]:
        """What is written of it."""
        seconds = time.monotonic() - self.clock
        named = {"step": self.step, "stage": self.stage} | ({"part": self.part} if self.part else {})
        who = {"role": place.role, "number": place.number, "calls": self.calls, "rows": self.rows}
        times = {"began": self.began, "clock": self.clock, "seconds": seconds}
        return named | who | times | {"read": self.read, "written": self.written}


_CURRENT: ContextVar[_Span | None] = ContextVar("stage", default=None)


class Recorder:
    """Appends to the files of one process; a file that can't be written is a PracticumError.

    Files are opened by the first write. What was added is in the file when the call returns. Safe from any
    thread.
    """

    def __init__(self, place: RecordPlace) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._files: dict[str, _LineFile] = {}
        self._spans: dict[tuple[int, str, str], _Span] = {}

    def add(
        self,
        stage: str,
        batch: BatchRef,
        columns: Mapping[str, Column],
        describe: Callable[[Tags], Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> None:
        """Add what a stage wrote of those rows of a batch that are recorded.

        `columns` have all rows of the batch. `describe` gives what is to be said of a row by its tags, `more`
        is said of all rows.
        """
        by_step: dict[int, list[int]] = {}
        for i, one in enumerate(batch.tags):
            if one.recorded:
                by_step.setdefault(one.step, []).append(i)
        kept = {name: column for name, column in columns.items() if self._keeps(column)}
        for step, places in by_step.items():
            head: dict[str, Any] = {"step": step, "stage": stage, "rows": [batch.keys[i] for i in places]}
            texts = _row_texts(head, kept, places) if kept else []
            if describe is not None:
                head["tags"] = [describe(batch.tags[i]) for i in places]
            with self._lock:
                if texts:
                    head["at"] = self._file(COLUMNS).append(texts)
                self._file(ROWS).append([json.dumps(head | more, ensure_ascii=False)])

    def _keeps(self, column: Column) -> bool:
        return self.place.everything or not isinstance(column, Ragged) or prod(column.trailing) <= WIDE

    @contextmanager
    def span(self, stage: str, step: int, part: str = "", rows: int = 0) -> Iterator[None]:
        """A stage, or a part of it such as one teacher, runs here inside; without a step nothing is kept."""
        if not step:
            yield
            return
        name = step, stage, part
        with self._lock:
            span = self._spans.setdefault(name, _Span(*name))
            span.under_way += 1
            span.calls += 1
            span.rows += rows
        before = _CURRENT.set(span)
        try:
            yield
        finally:
            _CURRENT.reset(before)
            with self._lock:
                span.under_way -= 1
                if not span.under_way:
                    del self._spans[name]
                    self._file(STAGES).append([json.dumps(span.line(self.place))])

    def stage(self, default: str) -> str:
        """The stage under way where this is called, or the default."""
        span = _CURRENT.get()
        return default if span is None else span.stage

    def count(self, stage: str, columns: Mapping[str, Column], *, read: bool) -> None:
        """Count the bytes of columns that were read or written, for the stage under way."""
        with self._lock:
            span = _CURRENT.get() or next((s for s in self._spans.values() if s.stage == stage), None)
            if span is None:
                return
            counts = span.read if read else span.written
            for name, column in columns.items():
                counts[name] = counts.get(name, 0) + _bytes(name, column)

    def _file(self, kind: str) -> _LineFile:
        if kind not in self._files:
            self._files[kind] = _LineFile(self.place.path(kind))
        return self._files[kind]


def told_tags(tags: Tags) -> dict[str, Any]:
    """A row's tags that are not as by default."""
    return {n: value for n, default in _DEFAULTS.items() if (value := getattr(tags, n)) != default}


def _row_texts(head: Mapping[str, Any], columns: Mapping[str, Column], places: Sequence[int]) -> list[str]:
    """The columns of each of these rows as a line."""
    cells = {name: column_texts(column, places) for name, column in columns.items()}
    lines = []
    for i, key in enumerate(head["rows"]):
        named = json.dumps({"step": head["step"], "row": key, "stage": head["stage"]})
        values = ", ".join(f'"{name}": {texts[i]}' for name, texts in cells.items())
        lines.append(f'{named[:-1]}, "columns": {{{values}}}}}')
    return lines


def _bytes(name: str, column: Column) -> int:
    if isinstance(column, Ragged):
        # By lengths: asking each tensor for its size takes longer than all else here.
        each = prod(column.trailing) if FIELDS[name].trailing else 1
        return sum(column.lengths) * each * FIELDS[name].itemsize
    return 0 if isinstance(column, list) else column.nbytes


class _LineFile:
    """A file of lines that one process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self.size = os.fstat(self._handle).st_size
            is_cut = self.size and os.pread(self._handle, 1, self.size - 1) != b"\n"
        except OSError as error:
            raise _cannot_write(path, error) from error
        if not self.size:
            self.append([json.dumps(HEADER)])
        elif is_cut:  # its writer was killed in the middle of a line
            self.append([""])

    def append(self, lines: Sequence[str]) -> list[int]:
        """Add lines; gives where each begins, and where the last one ends."""
        data = [f"{line}\n".encode("utf-8", "backslashreplace") for line in lines]
        ends, at = [self.size], self.size
        for line in data:
            at += len(line)
            ends.append(at)
        left = memoryview(b"".join(data))
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self.size = at
        return ends

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)


def _cannot_write(path: Path, error: OSError) -> PracticumError:
    return PracticumError(
        f"{path} can't be written: {error.strerror}.\n"
        "  → make room, or record less: --set track.record=none records no rows"
    )
