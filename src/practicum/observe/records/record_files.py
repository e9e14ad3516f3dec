"""The files of a record: where each process writes, the format, and the columns that the update adds.

`RUN/record/` has two files for each process that writes. `ROLE-NUMBER.jsonl` begins with `HEADER`. A line has
the rows that a stage wrote, with tags, the places of their columns and checksums, or it is a `StageSpan`.
`ROLE-NUMBER.bin` has the columns, one safetensors block for each row and stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = "record"
FORMAT = 3
HEADER = {"practicum": "record", "format": FORMAT}
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
"""Columns of a recorded row that the student's update adds; a token that was not trained on has NaN."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where one process writes: the record's folder, its role and number, and whether rows are kept whole."""

    folder: Path
    role: str
    number: int = 0
    everything: bool = False

    @property
    def lines(self) -> Path:
        return self.folder / f"{self.role}-{self.number}.jsonl"


def columns_file(lines: Path) -> Path:
    """Return the file of columns that belongs to a .jsonl file of a record."""
    return lines.with_suffix(".bin")


def record_files(folder: Path) -> list[Path]:
    """Return all files of a record, in order."""
    return sorted(path for path in folder.glob("*") if path.suffix in (".jsonl", ".bin"))
