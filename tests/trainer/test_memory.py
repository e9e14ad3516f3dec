"""A run's memory stays what it was after its first steps, and garbage collections scan few objects."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.teachers.tiny_teachers import save_teacher

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

GRPO: dict[str, Any] = {
    "name": "soak",
    "seed": 1,
    "model": {"path": "s"},
    "tasks": {"sort": {"kind": "sort", "options": {"length": [6, 20]}}},
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
    # Responses of many lengths: as many numbers of rows.
    "rollout": {"samples": 8, "max_new_tokens": 32, "stop": list(string.digits)},
    "train": {"prompts": 16, "lr": 1e-5},
    "eval": {"rows": 1},
    "runtime": {"threads": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "distillation": {"teachers": {"t": {"model": "t"}}, "distill": {"signal": "full"}},
    "agents": {"agent": {"loop": "tests.museum.loops:a_word_and_an_answer"}},
    "lag": {"rollout": GRPO["rollout"] | {"lag": 1}},
}
EARLY, STEPS = 20, 60
CHILD = """
import gc, json, sys
from pathlib import Path
import practicum as pr
from practicum.cpu import batch_invariance

if sys.argv[2:]:
    batch_invariance.rounded_rows = batch_invariance.padded_rows
scanned = [0]

def note(phase, info):
    if phase == "start" and info["generation"] == 2:
        scanned.append(len(gc.get_objects()))

def report(metrics):
    if "time/step" in metrics:
        resident = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
        print(resident, max(scanned), gc.get_freeze_count(), flush=True)
        scanned[:] = [0]

gc.callbacks.append(note)
pr.train(json.loads(sys.argv[1]), out="run", on_step=report, quiet=True)
"""
"""Prints after each step the resident memory, the most objects that a complete collection scanned, and the
number of objects that none scans."""


def run_steps(folder: Path, case: str, *changed: str, **environment: str) -> tuple[float, float]:
    """Return the memory at the end of a run over that at step EARLY, and the largest share of its objects
    that a collection scanned from step 3 on."""
    for seed, name in enumerate("st"):
        save_teacher(folder / name, seed=seed, scale=1.0, hidden=256, layers=4, heads=4)
    recipe = GRPO | CASES[case]
    recipe["train"] = recipe["train"] | {"steps": STEPS}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(recipe), *changed],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"} | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    steps = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert len(steps) == STEPS
    sizes, scanned, spared = zip(*steps, strict=True)
    print(case, [size // 1024 for size in sizes[9::10]], "MiB", max(scanned[2:]), "of", spared[-1], "objects")
    return max(sizes[-5:]) / sizes[EARLY - 1], max(scanned[2:]) / max(spared[-1], 1)


@pytest.mark.parametrize("case", CASES)
def test_memory_stays_and_collections_scan_few_objects(case: str, tmp_path: Path):
    growth, share = run_steps(tmp_path, case)
    assert growth < 1.1
    assert share < 0.1


def test_memory_grows_with_as_many_numbers_of_rows_as_batches(tmp_path: Path):
    """The test above fails if what it watches comes back."""
    libraries = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "1024")
    growth, _ = run_steps(tmp_path, "grpo", "unrounded", **libraries)
    assert growth > 1.1
