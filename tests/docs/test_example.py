"""The one-file example runs, and learns."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from .pages import ROOT

EXAMPLE = ROOT / "examples/one_file.py"


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--warmup", "10", "--steps", "2"])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert re.findall(r"^step +(\d+)  reward \d\.\d+", output, re.MULTILINE) == ["1", "2"]
    assert "warm-up  10" in output
    gaps = [float(gap) for gap in re.findall(r"gap (\S+)", output)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_learns():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"first 5 steps (\d\.\d+), last 5 steps (\d\.\d+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 0.2, done.stdout
