"""Memory of a long run: what its process holds does not grow with its steps.

oneDNN and torch cache what they prepared for each number of rows; `cpu/linears.py` bounds both caches. The
model is large enough to show it: with their default capacities of 1,024, set in the environment, this fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

FIRST, LAST = 15, 45
RECIPE = {
    "name": "soak",
    "model": {"make": {"hidden": 256, "layers": 4, "context": 128}},
    "tasks": {"sort": {"kind": "sort", "options": {"length": [6, 18]}}},
    "rollout": {"samples": 8, "max_new_tokens": 32},
    "train": {"steps": LAST, "prompts": 16, "lr": 1e-5},
    "eval": {"rows": 1},
    "runtime": {"threads": 1},
}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_does_not_grow_with_the_steps(tmp_path: Path):
    recipe, metrics = tmp_path / "soak.yaml", tmp_path / "run" / "metrics.jsonl"
    recipe.write_text(json.dumps(RECIPE))
    command = [sys.executable, "-m", "practicum", "train", str(recipe), "--out", str(metrics.parent)]
    resident: dict[int, int] = {}
    until = time.monotonic() + 900
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                assert time.monotonic() < until, f"only {len(resident)} steps were seen in time"
                step = metrics.read_text().count('"time/step"') if metrics.exists() else 0
                status = Path(f"/proc/{process.pid}/status").read_text()
                if "VmRSS:" in status:
                    resident.setdefault(step, int(status.partition("VmRSS:")[2].split()[0]))
                time.sleep(0.02)
        finally:
            process.kill()
    assert process.returncode == 0
    first = next(size for step, size in sorted(resident.items()) if step >= FIRST)
    last = resident[max(resident)]
    assert max(resident) >= LAST - 1
    assert last <= 1.1 * first, f"{first // 1024} MiB at step {FIRST}, {last // 1024} at step {LAST}"
