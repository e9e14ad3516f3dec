"""The memory of a run stays what it was after its first steps, whatever lengths its answers have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .recipes import TINY

WARM, STEPS, GROWTH = 20, 60, 1.1
WIDE: dict[str, Any] = {
    # Wide enough for oneDNN, which prepares code for each number of rows: here another one in each step.
    "model": {"random_init": {"hidden": 256, "layers": 1, "heads": 8, "head_dim": 64, "context": 256}},
    "tasks": {"sort": {"kind": "sort", "options": {"length": [2, 200]}}},
    "rollout": {"samples": 2, "max_new_tokens": 8, "max_num_seqs": 32},
    "train": {"steps": STEPS, "prompts": 12, "lr": 1e-5},
    "eval": {"rows": 1},
}
SCRIPT = """
import sys
import practicum as pr

def note(row):
    print(int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20, flush=True)

pr.train(sys.argv[1], out=sys.argv[2], on_step=note, quiet=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["grpo", "distillation"])
def test_memory_does_not_grow_with_steps(tmp_path: Path, kind: str):
    recipe = TINY | WIDE
    if kind == "distillation":
        copy = {"student": {"every": 1000}}
        recipe |= {"teachers": {"old": copy}, "distill": {"signal": "full"}, "reward": {"weight": 0.0}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-c", SCRIPT, tmp_path / "recipe.json", tmp_path / "run"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ, timeout=300)
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == STEPS + 1
    assert sizes[-1] <= GROWTH * sizes[WARM], sizes
