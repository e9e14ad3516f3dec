"""vLLM under Ray: the student's engine, colocated and own teachers, an adapter among them; and a lag."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Model
from tests.teachers.tiny_teachers import save_adapter
from tests.vllm.models import MAKE, await_true, descendants, still_there

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "model": {"random_init": MAKE | {"layers": 1}},
    "tasks": {"sort": {"kind": "sort"}},
    "rollout": {"samples": 4, "max_new_tokens": 8, "max_num_seqs": 16, "engine": "vllm"},
    "teachers": {
        "self": {"student": {"every": 1}, "engine": "vllm"},
        "first": {"student": {}, "engine": "vllm", "placement": "own"},
        "tuned": {"adapter": "tuned", "engine": "vllm", "placement": "own"},
    },
    "route": {"map": {"sort": {"self": 0.3, "first": 0.3, "tuned": 0.4}}},
    "distill": {"top_k": 4},
    "algorithm": {"mismatch": "token"},
    "train": {"steps": 2, "prompts": 8, "lr": 1e-3},
    "runtime": {"kind": "ray", "threads": 1, "cpus": 6},
}


LATE = {key: RECIPE[key] for key in ("name", "model", "tasks")} | {
    "rollout": RECIPE["rollout"] | {"lag": 2},
    "reward": {"functions": [{"use": "letters:score"}]},
    "train": {"steps": 4, "prompts": 4, "lr": 1e-3},
    "eval": {"rows": 2, "every": 2},
    "pools": {"rollout": {"devices": 1}},
    "runtime": {"kind": "ray", "threads": 1, "cpus": 6},
}
LETTERS = "def score(sample):\n    return float(sum(map(ord, sample.response_text)) % 5)\n"


def train(tmp_path: Path, recipe: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """What a run says, and its metrics; it leaves no process."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "practicum", "train", "tiny.yaml", "--set", f"out={tmp_path / 'out'}"]
    seen: set[int] = set()
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:

        def ended() -> bool:
            seen.update(descendants(run.pid))
            return run.poll() is not None

        await_true(ended, 500)
        assert run.stdout is not None
        said = run.stdout.read().decode()
    assert run.returncode == 0, said
    assert len(seen) > 5
    await_true(lambda: not still_there(seen), 30)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    return said, [json.loads(line) for line in lines]


@pytest.mark.timeout(600)
def test_a_run_on_ray_samples_and_teaches_by_vllm_and_leaves_nothing(tmp_path: Path):
    base = load_model(Model.model_validate(RECIPE["model"]), RECIPE["seed"])
    base.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "tuned", str(tmp_path / "base"), seed=1)
    said, metrics = train(tmp_path, RECIPE)
    assert said.count(": vLLM ") == 3  # the colocated one is told by no worker of its own
    assert metrics[-1]["step"] == 2
    assert metrics[-1]["train/gap_max"] < 1e-4
    assert metrics[-1]["advantage/mismatch_weight"] == pytest.approx(1.0, abs=1e-4)
    assert metrics[-1]["teacher/tuned/kl"] > 0.01 > abs(metrics[-1]["teacher/self/kl"])


@pytest.mark.timeout(600)
def test_rollouts_on_ray_ahead_of_the_learner_are_by_the_weights_of_the_schedule(tmp_path: Path):
    """The run would stop at a row of another version, and at an engine with other numbers."""
    (tmp_path / "letters.py").write_text(LETTERS)
    _, metrics = train(tmp_path, LATE)
    assert [row["async/staleness_max"] for row in metrics if row["step"]] == [0, 1, 2, 2]
    assert [row["async/staleness"] for row in metrics if row["step"]] == [0, 1, 2, 2]
