"""Reads the record of a run, live or finished, without torch: summaries of all rows, the columns of one.

Heads are read once and followed as the files grow; columns are read when a row is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from practicum.dataplane.keys import Key, Tags
from practicum.errors import PracticumError
from practicum.records.json_files import LineFile, read_mapping
from practicum.records.record_files import COLUMNS, FOLDER, FORMAT, ROWS, STAGES, record_files


@dataclass(slots=True)
class RowSummary:
    """What is known of a recorded row without its columns."""

    step: int
    """The step that rolled it out."""
    key: Key
    tags: Tags = field(default_factory=Tags)
    trained: int | None = None
    """The step that learnt from it; None if none did (so far)."""
    update: int | None = None
    """Which optimizer step of that step was the first to have it, from 1; its columns are of that one."""
    places: list[tuple[Path, int, int, str]] = field(default_factory=list, repr=False)
    """File, begin and end of its columns, and the stage that wrote them."""


_TAGS = {f.name for f in fields(Tags)}


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A row with all its columns, by name; a column of tokens has a value for each response token.

    `stages` names the columns that each stage wrote, in order. `rules` has, by the name of each rule that
    held tokens, their places in the response.
    """

    summary: RowSummary
    columns: dict[str, Any]
    stages: dict[str, list[str]]
    rules: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A stage, or a part of it (a teacher, a reward model), as one process ran it.

    `began` is by the wall clock, `clock` by the machine's monotonic one. Bytes read and written are by field.
    """

    step: int
    stage: str
    role: str
    number: int
    began: float
    clock: float
    seconds: float
    calls: int = 1
    rows: int = 0
    part: str = ""
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)


_SPAN = {f.name for f in fields(StageSpan)}


class Record:
    """The record of a run folder. `refresh` takes up what was written since.

    What can't be read is left out and told in `problems`. A run that records nothing has no steps.
    """

    def __init__(self, run: Path) -> None:
        require_run(run)
        self.run = run
        self.problems: list[str] = []
        self._clear()
        self.refresh()

    def _clear(self) -> None:
        self._files: dict[Path, LineFile] = {}
        self._unknown: set[Path] = set()
        self._rows: dict[int, dict[Key, RowSummary]] = {}
        self._stages: dict[int, list[StageSpan]] = {}
        self.problems.clear()

    def refresh(self) -> bool:
        """Read what was added; whether there was anything. A resumed run may have cut its files back."""
        if any(file.was_cut() for file in self._files.values()):
            self._clear()
        folder, news = self.run / FOLDER, False
        for kind, take in ((ROWS, self._take_rows), (STAGES, self._take_stage)):
            for path in record_files(folder, kind):
                if path not in self._files:
                    self._files[path] = LineFile(path, partial(self._take, path, take))
                file = self._files[path]
                broken = file.broken
                news |= file.refresh()
                if file.broken > broken:
                    self.problems.append(f"{path}: what was cut off or is not of this format is left out")
        return news

    def _take(
        self, path: Path, take: Callable[[Path, Any], None], line: dict[str, Any], at: int, _: int
    ) -> None:
        if at == 0 and line.get("format") != FORMAT:
            self._unknown.add(path)
            self.problems.append(
                f"{path} is a record of format {line.get('format')}, this version of practicum reads {FORMAT}"
            )
        if at and path not in self._unknown:
            try:
                take(path, line)
            except (KeyError, TypeError, ValueError) as error:
                self.problems.append(f"{path}: a line that is not of this format ({error})")

    def steps(self) -> list[int]:
        """The steps of which there are rows or stages."""
        return sorted(self._rows.keys() | self._stages.keys())

    def rows(self, step: int | None = None) -> list[RowSummary]:
        """The rows that a step rolled out, or all, in order."""
        steps = sorted(self._rows) if step is None else [step]
        return [row for s in steps for _, row in sorted(self._rows.get(s, {}).items())]

    def stages(self, step: int) -> list[StageSpan]:
        """What ran in a step, on every process, in order of its begin."""
        return sorted(self._stages.get(step, ()), key=lambda span: span.began)

    def row(self, step: int, key: tuple[int, ...]) -> RecordedRow | None:
        """A row with its columns as far as they are written; None if it is not recorded."""
        summary = self._rows.get(step, {}).get(Key._make(key))
        if summary is None:
            return None
        columns: dict[str, Any] = {}
        stages: dict[str, list[str]] = {}
        rules: dict[str, list[int]] = {}
        for path, begin, end, stage in summary.places:
            written = self._columns(path, begin, end, summary)
            rules |= written.pop("rules", {})
            columns |= written
            names = stages.setdefault(stage, [])
            names += [name for name in written if name not in names]
        _add_versions(columns, summary)
        return RecordedRow(summary, columns, stages, rules)

    def texts(self, row: RowSummary) -> list[bytes]:
        """The lines of a row's columns as they are, in an order of their own: to tell rows apart."""
        lines = []
        for path, begin, end, _ in row.places:
            with path.open("rb") as file:
                file.seek(begin)
                lines.append(file.read(end - begin))
        return sorted(lines)

    def _columns(self, path: Path, begin: int, end: int, row: RowSummary) -> dict[str, Any]:
        try:
            with path.open("rb") as file:
                file.seek(begin)
                line = json.loads(file.read(end - begin))
            if tuple(line["row"]) == row.key:
                return line["columns"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self.problems.append(f"{path}: the columns of {row.key} can't be read")
        return {}

    def _take_rows(self, path: Path, line: dict[str, Any]) -> None:
        step, stage, at = line["step"], line["stage"], line.get("at")
        file = path.with_name(path.name.replace(ROWS, COLUMNS, 1))
        tags = line.get("tags") or [{}] * len(line["rows"])
        for i, (numbers, told) in enumerate(zip(line["rows"], tags, strict=True)):
            key = Key._make(numbers)
            row = self._rows.setdefault(step, {}).get(key)
            if row is None:
                row = self._rows[step][key] = RowSummary(step, key)
            known = {name: value for name, value in told.items() if name in _TAGS}
            row.tags = replace(row.tags, step=step, **known)
            row.trained, row.update = line.get("trained", row.trained), line.get("update", row.update)
            if at is not None:
                row.places.append((file, at[i], at[i + 1], stage))

    def _take_stage(self, path: Path, line: dict[str, Any]) -> None:
        span = StageSpan(**{name: value for name, value in line.items() if name in _SPAN})
        self._stages.setdefault(span.step, []).append(span)


def require_run(run: Path) -> None:
    """A PracticumError if a folder is not that of a run."""
    if "practicum" not in read_mapping(run / "versions.json"):
        what = "is no folder" if not run.is_dir() else "is not the folder of a run: it has no versions.json"
        raise PracticumError(f"{run} {what}.\n  → name the folder of a run, such as runs/NAME")


def _add_versions(columns: dict[str, Any], row: RowSummary) -> None:
    """The version that sampled each token, where all tokens of the row have the same one."""
    if (
        "version" not in columns
        and "response_mask" in columns
        and row.tags.version_min == row.tags.version_max
    ):
        version = row.tags.version_min
        columns["version"] = [version if sampled else None for sampled in columns["response_mask"]]
