"""The recipes of `sort` and `own_data` reach what their `expected` says, with the seed that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.run import train_recipes

RECIPES = ("grpo", "ppo", "dapo", "gspo", "second_thoughts", "taught")
"""Of sort, in an order in which each finds the models that it starts from or learns from."""
HELD_ELSEWHERE = {"ray": "tests/trainer/test_ray.py: Ray gives the numbers of one process"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all of them run in."""
    return tmp_path_factory.mktemp("bands")


def scores(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Train by a recipe; the share of sampled answers that are right, before and after."""
    monkeypatch.chdir(folder)
    path = shipped_recipes() / f"{name}.yaml"
    loaded = load_recipe(path, ["runtime.threads=1"])
    train_recipes([loaded], fresh=True)
    run = Path(loaded.recipe.out or "")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines[0]["eval/mean@4"], lines[-1]["eval/mean@4"]


def expected(name: str, pattern: str) -> list[float]:
    """The numbers of a recipe's `expected`."""
    text = load_recipe(shipped_recipes() / f"{name}.yaml").recipe.expected or ""
    match = re.search(pattern, text)
    assert match is not None, f"{name}: no band in {text!r}"
    return [float(number) for number in match.groups()]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sort/start", "own_data/start"])
def test_a_start_is_often_wrong(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch):
    low, high = expected(name, r"^eval/mean@4 (\d\.\d+) to (\d\.\d+)")
    _, after = scores(name, runs, monkeypatch)
    assert low <= after <= high


@pytest.mark.long
@pytest.mark.parametrize("name", [*(f"sort/{name}" for name in RECIPES), "own_data/grpo"])
def test_a_recipe_rises_above_its_start(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch):
    (least,) = expected(name, r"^eval/mean@4 at least (\d\.\d+) above the start")
    before, after = scores(name, runs, monkeypatch)
    assert after - before >= least


def test_every_recipe_of_sort_is_held():
    files = {file.stem for file in (shipped_recipes() / "sort").glob("*.yaml")}
    assert files == {"start", *RECIPES, *HELD_ELSEWHERE}
