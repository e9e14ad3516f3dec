"""Agents of other frameworks learn, in their own environments, which `make test-clients` makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sessions.endpoint.test_bridges import PYTHON as VERIFIERS
from tests.sessions.endpoint.test_clients import PYTHON as CLIENTS

from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.run import train_recipes

RECIPES = {
    "agents_http/openai_agents": ("agents_http/start", CLIENTS),
    "agents_http/smolagents": ("agents_http/start", CLIENTS),
    "verifiers/grpo": ("sort/start", VERIFIERS),
}
"""By name: the recipe of the model that it starts from, and the Python of its agent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all of them run in, with the files that their programs write."""
    folder, recipes = tmp_path_factory.mktemp("bands"), shipped_recipes()
    programs = [[sys.executable, "agents_http/sums.py", "runs/agents_http/tokenizer"]]
    programs += [[str(VERIFIERS), "verifiers/digits.py", "runs/verifiers"]] * VERIFIERS.exists()
    for python, program, written in programs:
        subprocess.run([python, str(recipes / program), written], check=True, timeout=120, cwd=folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_an_agent_of_a_framework_rises_above_its_start(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    start, python = RECIPES[name]
    if not python.exists():
        pytest.skip("`make test-clients` makes the environments of agents")
    monkeypatch.chdir(folder)
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
