"""The campaign notices the faults it looks for."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from tests.campaign.scenarios import REPLICA
from tests.campaign.strike import compare, last_words


def make_run(folder: Path, **changes: Any) -> Path:
    """A folder as a run of three steps leaves it."""
    rows = [{"step": step, "train/loss": step / 7, "time/step": random.random()} for step in range(4)]
    rows[2] |= changes
    (folder / "export").mkdir(parents=True)
    (folder / "export/model.safetensors").write_bytes(b"weights")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("samples.jsonl", "eval.jsonl"):
        (folder / name).write_text('{"id": "1/0/0"}\n{"id": "1/0/1"}\n')
    return folder


def test_the_judge_sees_a_bit_a_lost_step_and_a_record_that_is_there_twice(tmp_path: Path):
    whole = make_run(tmp_path / "whole")
    assert compare(whole, make_run(tmp_path / "same"), finished=True) == []
    other = make_run(tmp_path / "bit", **{"train/loss": 2 / 7 + 1e-16})
    assert compare(whole, other, finished=False) == ["step 2 differs in train/loss"]
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]) + '{"half')
    (other / "samples.jsonl").write_text('{"id": "1/0/0"}\n{"id": "1/0/0"}\n')
    (other / "export/model.safetensors").write_bytes(b"others")
    told = " ".join(compare(whole, other, finished=True))
    assert "has the steps [0, 1, 3]" in told
    assert "samples.jsonl has other records" in told
    assert "the exported weights differ" in told


def test_progress_names_nobody():
    printed = "it · step 2/10 · rollout 149 tokens/s\n\nrollout (train) was not done after 9 s\n"
    assert "rollout (train)" in last_words(printed)
    assert not re.search(REPLICA.names, last_words(printed))
    assert re.search(REPLICA.names, last_words(f"{printed}: rollout 1 gave no sign of life"))
