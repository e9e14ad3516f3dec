"""Whole runs on the pretend GPU: no tensor is left on the CPU, and the numbers are the CPU's, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import CASES, DOCTOR, LEFT_BEHIND

QUICK = ("top_k", LEFT_BEHIND)


def differences(folder: Path, *names: str) -> dict[str, str]:
    """What differs, of each case that differs."""
    command = [sys.executable, "-m", "tests.devices.cases", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "found.json").read_text())
    assert found.keys() == set(names)
    return {name: what for name, what in found.items() if what}


@pytest.mark.long
def test_learner_engine_and_teachers_work_on_a_gpu(tmp_path: Path):
    assert differences(tmp_path, *QUICK) == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_that_runs_on_a_cpu_runs_on_a_gpu(tmp_path: Path):
    assert differences(tmp_path, *(CASES.keys() - set(QUICK)), DOCTOR) == {}
