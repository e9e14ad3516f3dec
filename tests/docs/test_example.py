"""The one-file example runs, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .pages import ROOT


def run_example(*args: str) -> str:
    command = [sys.executable, "examples/one_file.py", *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs():
    output = run_example("--warmup", "10", "--steps", "2")
    assert re.findall(r"^step +(\d+)  reward \d\.\d+", output, re.MULTILINE) == ["1", "2"]
    assert "warm-up  10" in output
    gaps = [float(gap) for gap in re.findall(r"gap (\S+)", output)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_learns():
    output = run_example()
    found = re.search(r"first 5 steps (\d\.\d+), last 5 steps (\d\.\d+)", output)
    assert found is not None, output
    assert float(found[2]) > float(found[1]) + 0.2, output
