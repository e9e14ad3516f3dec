"""The files of a record: `RUN/record/`, JSON lines, three files for each process that writes.

    rows-<role>-<number>.jsonl     one line for each write: step, stage, rows, tags, where their columns lie
    columns-<role>-<number>.jsonl  one line for each row of a write: its columns
    stages-<role>-<number>.jsonl   one line for each stage that ran there: when, how long, bytes by field

The first line of each names the format. Numbers are standard JSON: NaN is null, infinity is 1e999.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = "record"
FORMAT = 1
HEADER = {"practicum": "record", "format": FORMAT}
ROWS, COLUMNS, STAGES = KINDS = ("rows", "columns", "stages")
WIDE = 64
"""Columns with more numbers than this for a token, and objects, are only in a record of all rows."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where one process writes: the record's folder, its role and number, and whether rows are kept whole."""

    folder: Path
    role: str
    number: int = 0
    everything: bool = False

    def path(self, kind: str) -> Path:
        """The file of one kind."""
        return self.folder / f"{kind}-{self.role}-{self.number}.jsonl"


def record_files(folder: Path, kind: str = "*") -> list[Path]:
    """The files of a record, of one kind or of all, in order."""
    return sorted(folder.glob(f"{kind}-*.jsonl"))
