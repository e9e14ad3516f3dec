"""The demo and the recipes do what their READMEs say."""

import shutil
from pathlib import Path

import pytest

from practicum.commands.demo import demo_rows, run_demo, shortfalls
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.run import train_loaded

RECIPES = shipped_recipes()
RISE = 0.12
"""What PPO adds to the base model's score at least."""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_student_learns_from_all_specialists_at_once(tmp_path: Path):
    assert shortfalls(run_demo(tmp_path / "runs")) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
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
    monkeypatch.setattr("practicum.commands.demo.shipped_recipes", lambda: short)
    for _ in range(2):  # a second demo replaces the first
        run_demo(tmp_path / "runs")
    shown = capsys.readouterr().out
    assert "specialist reverse" in shown
    assert "teacher rotate" in shown
    assert str(tmp_path / "runs" / "student") in shown.replace("\n", "")
    assert shown.replace("\n", " ").endswith(f"practicum view {tmp_path / 'runs'}   opens it in a browser ")
    assert (tmp_path / "runs" / "student" / "export" / "config.json").is_file()


def test_the_last_row_is_the_part_of_the_way_to_each_specialist():
    def scores(copy: float, sort: float) -> dict[str, float]:
        greedy = {"eval/greedy/copy": copy, "eval/greedy/sort": sort}
        return {**greedy, "eval/mean@1/copy": copy / 2, "eval/mean@1/sort": sort / 2}

    exam = {"base": scores(0.5, 0.2), "copy": scores(1.0, 0.1), "sort": scores(0.4, 0.2)}
    rows = demo_rows({**exam, "student": scores(0.9, 0.3)})
    assert rows["student, of the way"] == {"copy": pytest.approx(0.8)}  # sort's specialist went nowhere
    assert rows["specialist copy"] == {"copy": 1.0, "sort": 0.1, "mean": pytest.approx(0.55)}
    assert rows["student, sampled"] == {"copy": 0.45, "sort": 0.15, "mean": pytest.approx(0.3)}


def passing() -> dict[str, dict[str, float]]:
    return {
        "base, sampled": {"copy": 0.4, "sort": 0.3, "mean": 0.35},
        "specialist copy, sampled": {"copy": 0.96, "sort": 0.3, "mean": 0.63},
        "specialist sort, sampled": {"copy": 0.4, "sort": 0.94, "mean": 0.67},
        "student": {"copy": 1.0, "sort": 1.0, "mean": 1.0},
        "student, sampled": {"copy": 0.94, "sort": 0.92, "mean": 0.93},
        "student, of the way": {"copy": 0.96, "sort": 0.97},
    }


@pytest.mark.parametrize(
    ("row", "column", "value", "said"),
    [
        ("base, sampled", "mean", 0.76, "base model's sampled mean is 0.76"),
        ("specialist copy, sampled", "copy", 0.69, "specialist of copy reaches 0.69"),
        ("student, of the way", "sort", 0.89, "0.89 of the way on sort"),
        ("specialist sort, sampled", "mean", 0.94, "not above that of each specialist"),
        ("student", "mean", 0.79, "mean of student is 0.79"),
        ("student, sampled", "mean", 0.79, "mean of student, sampled is 0.79"),
    ],
)
def test_what_is_outside_the_bands_is_said(row: str, column: str, value: float, said: str):
    assert shortfalls(passing()) == []
    rows = passing()
    rows[row][column] = value
    (sentence,) = shortfalls(rows)
    assert said in sentence
