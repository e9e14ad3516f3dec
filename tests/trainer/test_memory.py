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
    "agents": {
        "agent": {"loop": "tests.museum.loops:turns_of_many_lengths"},
        "rollout": {"samples": 8, "max_new_tokens": 16, "context": 128},
        "train": {"prompts": 8, "lr": 1e-5},
    },
    "lag": {"rollout": GRPO["rollout"] | {"lag": 1}},
    "two ranks on Ray": {
        "runtime": {"kind": "ray", "threads": 1, "cpus": 8},
        "pools": {"train": {"devices": 2}},
    },
}
EARLY, STEPS = 20, 60
LEAST_KIB = 200_000
"""Of processes that have no model, the memory is not judged."""
CHILD = """
import gc, json, os, sys
from contextlib import suppress
from pathlib import Path
import practicum as pr
from practicum.cpu import batch_invariance

if sys.argv[2:]:
    batch_invariance.rounded_rows = batch_invariance.padded_rows
scanned = [0]

def sizes(pid):
    found = {}
    with suppress(OSError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text()
        if "RssAnon:" in status:  # not memory that processes share, such as Ray's store
            found[pid] = int(status.split("RssAnon:")[1].split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended
                for child in (task / "children").read_text().split():
                    found |= sizes(int(child))
    return found

def note(phase, info):
    if phase == "start" and info["generation"] == 2:
        scanned.append(len(gc.get_objects()))

def report(metrics):
    if "time/step" in metrics:
        print(json.dumps([sizes(os.getpid()), max(scanned), gc.get_freeze_count()]), flush=True)
        scanned[:] = [0]

gc.callbacks.append(note)
pr.train(json.loads(sys.argv[1]), out="run", on_step=report, quiet=True)
"""
"""Prints after each step the resident memory of each process of the run, the most objects that a complete
collection scanned, and the number of objects that none scans."""


def run_steps(folder: Path, case: str, *changed: str, **environment: str) -> tuple[float, float]:
    """Return the memory at the end of a run over that at step EARLY, of the process where it grew most, and
    the largest share of its objects that a collection scanned from step 3 on."""
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
    steps = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(steps) == STEPS
    sizes, scanned, spared = zip(*steps, strict=True)
    lasting = [pid for pid in sizes[-1] if sizes[EARLY - 1].get(pid, 0) > LEAST_KIB]
    for pid in lasting:
        print(case, pid, [step.get(pid, 0) // 1024 for step in sizes[9::10]], "MiB")
    print(case, max(scanned[2:]), "of", spared[-1], "objects")
    growth = max(max(step[pid] for step in sizes[-5:]) / sizes[EARLY - 1][pid] for pid in lasting)
    return growth, max(scanned[2:]) / max(spared[-1], 1)


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
