"""Reads the record of a run without torch: summaries of all rows, the columns of one, the timeline."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from practicum.dataplane.keys import Key, Tags
from practicum.errors import PracticumError
from practicum.observe.records.json_files import LineFile, read_mapping
from practicum.observe.records.record_files import FOLDER, FORMAT, columns_file


class Block(NamedTuple):
    """Columns of a row in a file: its path, begin and end, their checksum, and the stage that wrote them."""

    path: Path
    begin: int
    end: int
    checksum: int
    stage: str

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin)


@dataclass(slots=True)
class RowSummary:
    """A recorded row without its columns."""

    step: int
    """The step that rolled it out."""
    key: Key
    tags: Tags = field(default_factory=Tags)
    trained: int | None = None
    """The step that trained on it, or None if none did (so far)."""
    update: int | None = None
    """The first optimizer step of that step that had it, from 1; its columns are of that one."""
    blocks: list[Block] = field(default_factory=list, repr=False)

    def data(self) -> list[bytes] | None:
        """Return the bytes of its columns, or None if they can't be read, which reading the row reports."""
        try:
            return sorted(block.read() for block in self.blocks)
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A row with all its columns by name. A column of tokens has an entry for each response token.

    `stages` names the columns that each stage wrote, in order. `rules` has, by the name of each rule that
    held tokens, their places in the response. `objects` has the columns that are mappings.
    """

    summary: RowSummary
    columns: dict[str, np.ndarray]
    stages: dict[str, list[str]]
    rules: dict[str, list[int]]
    objects: dict[str, dict[str, np.ndarray]]


@dataclass(slots=True)
class StageSpan:
    """A stage, or a part of it (a teacher, a reward model), as one process ran it."""

    step: int
    stage: str
    part: str
    role: str
    number: int
    began: float
    seconds: float = 0.0
    calls: int = 0
    rows: int = 0


class Record:
    """The record of a run folder. What can't be read is left out and reported in `problems`."""

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
        """Read new lines. Return True if there are any. A resumed run may have cut its files back."""
        if any(file.was_cut() for file in self._files.values()):
            self._clear()
        news = False
        for path in sorted((self.run / FOLDER).glob("*.jsonl")):
            if path not in self._files:
                self._files[path] = LineFile(path, partial(self._take, path))
            file = self._files[path]
            broken = file.broken
            news |= file.refresh()
            if file.broken > broken:
                self.problems.append(f"{path}: what was cut off or is not of this format is left out")
        return news

    def _take(self, path: Path, line: dict[str, Any], at: int, _: int) -> None:
        if at == 0 and line.get("format") != FORMAT:
            self._unknown.add(path)
            self.problems.append(
                f"{path} is a record of format {line.get('format')}, this version of practicum reads "
                f"{FORMAT} only: read it with the version that versions.json names"
            )
        if not at or path in self._unknown:
            return
        try:
            if "seconds" in line:
                self._stages.setdefault(line["step"], []).append(StageSpan(**line))
            else:
                self._take_rows(path, line)
        except (KeyError, TypeError) as error:
            raise ValueError(error) from error

    def _take_rows(self, path: Path, line: dict[str, Any]) -> None:
        step, at = line["step"], line.get("at")
        tags = line.get("tags") or [{}] * len(line["rows"])
        for i, (numbers, changed) in enumerate(zip(line["rows"], tags, strict=True)):
            key = Key._make(numbers)
            row = self._rows.setdefault(step, {}).setdefault(key, RowSummary(step, key))
            row.tags = replace(row.tags, step=step, **changed)
            row.trained, row.update = line.get("trained", row.trained), line.get("update", row.update)
            if at is not None:
                row.blocks.append(Block(columns_file(path), at[i], at[i + 1], line["sums"][i], line["stage"]))

    def steps(self) -> list[int]:
        """Return the steps that have rows or stages."""
        return sorted(self._rows.keys() | self._stages.keys())

    def rows(self, step: int | None = None) -> list[RowSummary]:
        """Return the rows that a step rolled out, or all, in order."""
        steps = sorted(self._rows) if step is None else [step]
        return [row for s in steps for _, row in sorted(self._rows.get(s, {}).items())]

    def stages(self, step: int) -> list[StageSpan]:
        """Return the stages of a step on every process, in order of their start."""
        return sorted(self._stages.get(step, ()), key=lambda span: span.began)

    def row(self, step: int, key: tuple[int, ...]) -> RecordedRow | None:
        """Return a row with its columns as far as they are written, or None if it is not recorded."""
        summary = self._rows.get(step, {}).get(Key._make(key))
        if summary is None:
            return None
        row = RecordedRow(summary, {}, {}, {}, {})
        for block in summary.blocks:
            names = row.stages.setdefault(block.stage, [])
            for name, values in self._columns(block, summary).items():
                outer, _, inner = name.partition(".")
                if outer == "rules":
                    row.rules[inner] = values.tolist()
                    continue
                if inner:
                    row.objects.setdefault(outer, {})[inner] = values
                else:
                    row.columns[name] = values
                names += [] if outer in names else [outer]
        tags, columns = summary.tags, row.columns
        if "version" not in columns and "response_mask" in columns and tags.version_min == tags.version_max:
            columns["version"] = np.where(columns["response_mask"], tags.version_min, -1)
        return row

    def _columns(self, block: Block, row: RowSummary) -> dict[str, np.ndarray]:
        try:
            data = block.read()
            columns = load(data)
        except (OSError, ValueError, KeyError, SafetensorError):
            self.problems.append(f"{block.path}: the columns of {row.key} can't be read")
            return {}
        if zlib.crc32(data) != block.checksum:
            self.problems.append(f"{block.path}: the columns of {row.key} by {block.stage} were changed")
        return columns


def require_run(run: Path) -> None:
    """Raise a PracticumError if a folder is not that of a run."""
    if "practicum" not in read_mapping(run / "versions.json"):
        what = "is no folder" if not run.is_dir() else "is not the folder of a run: it has no versions.json"
        raise PracticumError(f"{run} {what}.\n  → name the folder of a run, such as runs/NAME")
