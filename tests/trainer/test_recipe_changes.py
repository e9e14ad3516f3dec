"""Resuming with another recipe: refused with the reason, or with --change allowed and recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from practicum.cli import app

from .recipes import tiny


def resolved(schedule: str = "constant", steps: int = 10, lr: float = 0.1) -> dict[str, Any]:
    return {"train": {"schedule": schedule, "steps": steps, "lr": lr}, "eval": {"rows": 1}}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and its run of two steps."""
    folder = tmp_path_factory.mktemp("changed")
    tiny(folder, train={"steps": 2, "prompts": 4, "lr": 1e-3}, eval={"rows": 4})
    assert resume(folder).exit_code == 0
    return folder


def resume(folder: Path, *options: str) -> Result:
    command = ["train", str(folder / "recipe.yaml"), "--out", str(folder / "run"), *options]
    return CliRunner().invoke(app, command)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (
            "model.random_init.layers=3",
            "model.random_init.layers: 2 → 3\n    the checkpoint holds the weights of another",
        ),
        ("model.dtype=float64", "have the other dtype"),
        ("train.optimizer=my:optimizer", "holds the state of the other optimizer"),
        ("algorithm.kl={place: reward, target: 0.1}", "an adapted weight is part of every checkpoint"),
        ("critic={lr: 1e-3}", "a critic's weights and optimizer state are part of every checkpoint"),
        ("seed=4", "the prompts differ from the checkpoint: the seed"),
        ("tasks.copy.weight=3", "the prompts differ from the checkpoint"),
    ],
)
def test_what_can_not_change_is_refused_with_the_reason_and_leaves_the_run_as_it_was(
    folder: Path, option: str, reason: str
):
    more = ["--set", "algorithm.advantage=gae"] if option.startswith("critic") else []
    before = {name: (folder / "run" / name).read_text() for name in ("recipe.yaml", "log.txt")}
    result = resume(folder, "--resume", "--change", "--set", option, *more)
    assert (result.exit_code, reason in result.stderr) == (2, True), result.stderr
    assert before == {name: (folder / "run" / name).read_text() for name in before}


def test_a_run_continues_with_another_learning_rate_when_told_to(folder: Path):
    options = ["--resume", "--set", "train.lr=5e-4", "--set", "train.steps=3"]
    refused = resume(folder, *options)
    assert refused.exit_code == 2
    assert "train.lr: 0.001 → 0.0005\n  → --change continues with the new values" in refused.stderr
    run = folder / "run"
    assert len(lines_of(run / "metrics.jsonl")) == 3
    assert resume(folder, *options, "--change").exit_code == 0
    assert [row["train/lr"] for row in lines_of(run / "metrics.jsonl")[1:]] == [1e-3, 1e-3, 5e-4]
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["lr"] == 5e-4
    changes = [(row["step"], row["key"], row["old"], row["new"]) for row in lines_of(run / "changes.jsonl")]
    assert changes == [(3, "train.lr", 1e-3, 5e-4), (3, "train.steps", 2, 3)]
    assert "changed from step 3 on: train.lr: 0.001 → 0.0005" in (run / "log.txt").read_text()
    assert resume(folder, *options[:-1], "train.steps=4").exit_code == 0  # the recipe is the run's by now
    assert len(lines_of(run / "changes.jsonl")) == 3
