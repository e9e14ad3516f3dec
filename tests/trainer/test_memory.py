"""A run's resident memory stays what it was after its first steps."""

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
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

GRPO: dict[str, Any] = {
    "name": "soak",
    "seed": 1,
    "tasks": {"sort": {"kind": "sort", "options": {"length": [6, 20]}}},
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
    # Answers of many lengths: as many numbers of rows.
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
EARLY, STEPS = 20, 80
CHILD = """
import json, sys
from pathlib import Path
import practicum as pr

def report(metrics):
    print(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0], flush=True)

pr.train(json.loads(sys.argv[1]), out="run", on_step=report, quiet=True)
"""
UNCAPPED = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "1024")
"""The libraries' defaults."""


def growth(folder: Path, case: str, *, steps: int = STEPS, **environment: str) -> float:
    """Return the memory at the end of a run over that at step EARLY, in steps around them."""
    for seed, name in enumerate("st"):
        save_teacher(folder / name, seed=seed, scale=1.0, hidden=256, layers=4, heads=4)
    recipe = GRPO | CASES[case] | {"model": {"path": "s"}}
    recipe["train"] = recipe["train"] | {"steps": steps}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(recipe)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"} | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=800,
    )
    sizes = [int(line) for line in ran.stdout.split()]
    assert len(sizes) == steps
    print(case, [size // 1024 for size in sizes[9::10]], "MiB")
    return max(sizes[-5:]) / sizes[EARLY - 1]


@pytest.mark.parametrize("case", CASES)
def test_memory_ends_within_a_tenth_of_what_it_was_early(case: str, tmp_path: Path):
    assert growth(tmp_path, case) < 1.1


def test_it_grows_without_limits_on_what_the_libraries_keep(tmp_path: Path):
    """The test above fails if what it watches comes back."""
    assert growth(tmp_path, "grpo", **UNCAPPED) > 1.1
