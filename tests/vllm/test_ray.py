"""vLLM under Ray: the student's engine, a colocated and an own teacher, in one run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.vllm.models import await_true, descendants, still_there

RECIPE = {
    "name": "tiny",
    "model": {"make": {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32, "context": 128}},
    "tasks": {"sort": {"kind": "sort"}},
    "rollout": {"samples": 4, "max_new_tokens": 8, "slots": 16, "engine": "vllm"},
    "teachers": {
        "self": {"student": {"every": 1}, "engine": "vllm"},
        "first": {"student": {}, "engine": "vllm", "placement": "own"},
    },
    "route": {"to": {"sort": {"self": 0.5, "first": 0.5}}},
    "distill": {"top_k": 4},
    "algorithm": {"mismatch": {"weights": "token"}},
    "train": {"steps": 2, "prompts": 4, "lr": 1e-3},
    "runtime": {"kind": "ray", "threads": 1, "cpus": 4},
}


@pytest.mark.timeout(600)
def test_a_run_on_ray_samples_and_teaches_by_vllm_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [
        sys.executable,
        "-m",
        "practicum",
        "train",
        "tiny.yaml",
        "--set",
        f"out={tmp_path / 'out'}",
    ]
    seen: set[int] = set()
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:

        def ended() -> bool:
            seen.update(descendants(run.pid))
            return run.poll() is not None

        await_true(ended, 500)
        assert run.stdout is not None
        said = run.stdout.read().decode()
    assert run.returncode == 0, said
    assert said.count(": vLLM ") == 2  # the colocated one is told by no worker of its own
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 2
    assert metrics[-1]["train/gap_max"] < 1e-4
    assert metrics[-1]["advantage/mismatch_weight"] == pytest.approx(1.0, abs=1e-4)
    assert len(seen) > 5
    await_true(lambda: not still_there(seen), 30)
