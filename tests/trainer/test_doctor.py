"""`practicum doctor` says what a machine has, and finds numbers that are wrong."""

import importlib.metadata
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from practicum.cli import app
from practicum.commands import doctor
from practicum.engines.torch import model_runner
from practicum.engines.torch.sampler import Sampled


def test_this_machine_is_sound():
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert [line.split()[0] for line in lines if "steps in" in line] == ["ok", "ok"]
    assert any(line.startswith("ok    packed rows") for line in lines)
    assert any(f"torch {torch.__version__}" in line for line in lines)
    assert any("GFLOP/s" in line for line in lines)
    assert any("GB/s" in line for line in lines)


def test_an_engine_with_other_numbers_is_found(monkeypatch: pytest.MonkeyPatch):
    sample = model_runner.sample

    def off(*args: Any) -> Sampled:
        drawn = sample(*args)
        return drawn._replace(plain_B=drawn.plain_B - 0.5)

    monkeypatch.setattr(model_runner, "sample", off)
    monkeypatch.setattr(doctor, "_EXAMINATIONS", doctor._EXAMINATIONS[1:2])
    (steps,) = [finding for finding in doctor.examine() if finding.name == "steps in float32"]
    assert steps.result == "wrong"
    assert "logprob" in steps.text


def test_versions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch):
    wanted = ["torch>=99", "nothing-of-the-kind>=1", "thing; extra == 'x'", "ray>=99; extra == 'ray'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    (found,) = [finding for finding in doctor._facts() if finding.name == "requirements"]
    assert found.result == "wrong"
    assert [text.split()[0] for text in found.text.split("; ")] == ["torch", "nothing-of-the-kind", "ray"]
