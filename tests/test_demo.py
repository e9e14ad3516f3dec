"""The demo and the recipes do what their READMEs say."""

import shutil
from pathlib import Path

import pytest

from practicum.recipe.load import load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.demo import demo_rows, run_demo
from practicum.trainer.run import train_loaded

RECIPES = shipped_recipes()
DOMAINS = ("copy", "reverse", "rotate")
OF_THE_WAY = 0.9
"""How far the student comes at least from the base model to each specialist."""
RISE = 0.12
"""What PPO adds to the base model's score at least."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_student_learns_from_all_specialists_at_once(tmp_path: Path):
    rows = run_demo(tmp_path / "runs")
    base, student = rows["base"], rows["student"]
    specialists = {domain: rows[f"specialist {domain}"] for domain in DOMAINS}
    for domain in DOMAINS:
        assert specialists[domain][domain] >= base[domain] + 0.1, domain
        assert rows["student, of the way"][domain] >= OF_THE_WAY, domain
    assert student["mean"] > max(row["mean"] for row in specialists.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_raises_the_score(tmp_path: Path):
    train_loaded(load_recipe(RECIPES / "mopd" / "base.yaml"), tmp_path / "base")
    loaded = load_recipe(RECIPES / "ppo" / "reverse.yaml", [f"model.path={tmp_path / 'base' / 'export'}"])
    outcome = train_loaded(loaded, tmp_path / "run")
    first, last = (scores["eval/greedy"] for scores in (outcome.first_eval, outcome.last_eval))
    assert last >= first + RISE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_command_ends_with_a_table_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    short = tmp_path / "recipes"
    shutil.copytree(RECIPES / "mopd", short / "whole")
    (short / "mopd").mkdir()
    for path in (short / "whole").glob("*.yaml"):
        cut = "train: {steps: 2, prompts: 6, warmup_steps: 0}\neval: {rows: 8, every: 1, stop_at: null}\n"
        (short / "mopd" / path.name).write_text(f"extends: ../whole/{path.name}\n{cut}")
    monkeypatch.setattr("practicum.trainer.demo.shipped_recipes", lambda: short)
    for _ in range(2):  # a second demo replaces the first
        run_demo(tmp_path / "runs")
    shown = capsys.readouterr().out
    assert "specialist reverse" in shown
    assert "teacher rotate" in shown
    assert str(tmp_path / "runs" / "student") in shown.replace("\n", "")
    assert (tmp_path / "runs" / "student" / "export" / "config.json").is_file()


def test_the_last_row_is_the_part_of_the_way_to_each_specialist():
    def scores(copy: float, sort: float) -> dict[str, float]:
        return {"eval/greedy": 0.0, "eval/greedy/copy": copy, "eval/greedy/sort": sort}

    exam = {"base": scores(0.5, 0.2), "copy": scores(1.0, 0.1), "sort": scores(0.4, 0.2)}
    rows = demo_rows({**exam, "student": scores(0.9, 0.3)})
    assert rows["student, of the way"] == {"copy": pytest.approx(0.8)}  # sort's specialist went nowhere
    assert rows["specialist copy"] == {"copy": 1.0, "sort": 0.1, "mean": pytest.approx(0.55)}
