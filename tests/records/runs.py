"""Small runs whose rows are recorded."""

from __future__ import annotations

from pathlib import Path

from practicum.tasks.scorers import RewardSample
from practicum.trainer.run import train_loaded
from tests.trainer.recipes import tiny

ALL = (
    "reward.functions=[tests.records.runs:letters]",
    "track.record=all",
    "train.steps=2",
    "train.minibatches=2",
    "train.lr=0.02",
    "algorithm.clip_high=0.02",
    "algorithm.clip_low=0.02",
    "checkpoint.every=1",
    "checkpoint.keep_last=5",
)
"""Two optimizer steps for each of two steps, the second of which clips; a checkpoint after each step."""


def letters(sample: RewardSample) -> float:
    """A reward that differs from answer to answer."""
    return float(sum(map(ord, sample.response_text)) % 5)


def recorded_run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    """The folder of a tiny run with everything recorded."""
    folder.mkdir(exist_ok=True)
    train_loaded(tiny(folder, *ALL, *overrides), folder / "run", resume=resume, quiet=True)
    return folder / "run"
