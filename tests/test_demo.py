"""The demo learns what its README says it learns."""

from pathlib import Path

import pytest

from practicum.recipe.load import load_recipe
from practicum.trainer.demo import run_demo, shipped_recipes
from practicum.trainer.run import train_loaded

DEMO = shipped_recipes() / "demo"
BASE = (0.30, 0.60)
"""Band of the base model's greedy score on sorting."""
RISE = 0.12
"""What GRPO and PPO add to it at least."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "base"
    outcome = train_loaded(load_recipe(DEMO / "base.yaml"), folder)
    assert BASE[0] <= outcome.last_eval["eval/greedy/sort"] <= BASE[1]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["grpo.yaml", "ppo.yaml"])
def test_rewards_alone_raise_the_score(recipe: str, base: Path, tmp_path: Path):
    loaded = load_recipe(DEMO / recipe, [f"model.path={base / 'export'}"])
    outcome = train_loaded(loaded, tmp_path / "run")
    first, last = (scores["eval/greedy"] for scores in (outcome.first_eval, outcome.last_eval))
    assert BASE[0] <= first <= BASE[1]
    assert last >= first + RISE


@pytest.mark.slow
def test_the_demo_command_ends_with_a_table_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    short = tmp_path / "recipes"
    (short / "demo").mkdir(parents=True)
    for name in ("base.yaml", "grpo.yaml"):
        cut = "\ntrain: {steps: 2, prompts: 4, warmup_steps: 0}\n"
        (short / "demo" / name).write_text(f"extends: {DEMO / name}{cut}")
    monkeypatch.setattr("practicum.trainer.demo.shipped_recipes", lambda: short)
    for _ in range(2):  # a second demo replaces the first
        run_demo(tmp_path / "runs")
    shown = capsys.readouterr().out
    assert "after GRPO" in shown
    assert str(tmp_path / "runs" / "grpo") in shown.replace("\n", "")
    assert (tmp_path / "runs" / "grpo" / "export" / "config.json").is_file()
