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
TRACED: dict[str, str] = {
    "learner_logprobs": "the sampled token by the student as it learns, at the rollout's temperature",
    "entropy": "of the student's distribution",
    "ratio": "importance ratio to the ratio's denominator",
    "weight": "what the advantage is multiplied by in the gradient: the ratio, and what clips made of it",
    "loss": "the token's part of the loss; over all tokens of the mini-batch it adds up to train/loss",
    "share": "its size as a fraction of the summed sizes of all tokens",
    "teacher_kl": "log-ratio of student to teacher: k1 of their KL",
    "teacher_overlap": "share of the teacher's top-k in the student's own",
    "teacher_entropy_gap": "entropy of the student minus the teacher's",
    "teacher_loss": "divergence from the teacher, before its weight",
    "kl": "estimate of the KL to the reference, if it is in the loss",
    "student_topk_ids": "the student's most likely tokens",
    "student_topk_logprobs": "their logprobs",
    "teacher_topk_ids": "the teacher's most likely tokens, with the signal full",
    "teacher_topk_logprobs": "their logprobs",
}
"""Columns of a recorded row that the student's update adds; a token that was not learnt from has null."""


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
