"""Agents of other frameworks learn, in their own environments: `make test-clients` makes these."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.sessions.endpoint.test_clients import PYTHON as CLIENTS

from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.run import train_recipes

VERIFIERS = CLIENTS.parents[2] / ".venv-verifiers/bin/python"
RECIPES = {
    "agents_http/openai_agents": ("agents_http/start", CLIENTS),
    "agents_http/smolagents": ("agents_http/start", CLIENTS),
    "verifiers/grpo": ("sort/start", VERIFIERS),
}
"""By name: the recipe of the model that it starts from, and the Python of its agent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bands")


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_an_agent_of_a_framework_rises_above_its_start(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    start, python = RECIPES[name]
    if not python.exists():
        pytest.skip("`make test-clients` makes the environments of agents")
    monkeypatch.chdir(folder)
    if python is VERIFIERS:
        program = str(shipped_recipes() / "verifiers/digits.py")
        subprocess.run([str(python), program, "runs/verifiers"], check=True, timeout=120)
    recipe = load_recipe(shipped_recipes() / f"{name}.yaml").recipe
    assert recipe.model.path is not None
    if not Path(recipe.model.path).exists():
        train_recipes([load_recipe(shipped_recipes() / f"{start}.yaml", ["runtime.threads=1"])], fresh=True)
    overrides = ["runtime.threads=1", f"agent.loop.python={python}"]
    train_recipes([load_recipe(shipped_recipes() / f"{name}.yaml", overrides)], fresh=True)
    assert recipe.expected is not None
    lines = [json.loads(line) for line in (Path(recipe.out or "") / "metrics.jsonl").read_text().splitlines()]
    before, after = (line[recipe.expected.metric] for line in (lines[0], lines[-1]))
    assert after >= recipe.expected.at_least
    assert after > before
