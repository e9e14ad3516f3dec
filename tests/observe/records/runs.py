"""Small runs whose rows are recorded."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load, save

from practicum.dataplane.keys import Key
from practicum.observe.records.read_record import Record
from practicum.rewards.reward_functions import RewardSample
from practicum.trainer.run import train_loaded
from tests.trainer.recipes import tiny

ALL = (
    "reward.functions=[tests.observe.records.runs:letters]",
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


def change_column(run: Path, step: int, stage: str, name: str, update: int | None = None) -> Key:
    """Change the last number of a column of a recorded row, in its file; returns the row's key."""
    record = Record(run)
    rows = [row for row in record.rows(step) if update is None or row.update == update]
    block = next(block for block in rows[-1].blocks if block.stage == stage)
    columns = load(block.read())
    columns[name].reshape(-1)[-1] += 1
    with block.path.open("r+b") as file:
        file.seek(block.begin)
        assert file.write(save(columns)) == block.end - block.begin
    return rows[-1].key


def recorded_run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    """The folder of a tiny run with everything recorded."""
    folder.mkdir(exist_ok=True)
    train_loaded(tiny(folder, *ALL, *overrides), folder / "run", resume=resume, quiet=True)
    return folder / "run"
