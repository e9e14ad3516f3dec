"""The one-file example runs, and learns; the cells of the notebook run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

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


def test_the_cells_of_the_notebook_run(empty_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = runpy.run_path(str(ROOT / "examples/notebook.py"))
    assert cells["run"].curve("reward/mean")[0] == [1, 2]
    assert (empty_folder / "runs/notebook/grpo/curves.png").stat().st_size > 10_000
    drawn = [line.get_label() for line in cells["right"].get_lines()]
    assert drawn == ["eval/greedy", "eval/mean@4", "eval/pass@4"]
    assert all(len(line.get_xdata()) == 2 for line in cells["right"].get_lines()), "steps 0 and 2"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_learns():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"first 5 steps (\d\.\d+), last 5 steps (\d\.\d+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 0.2, done.stdout
