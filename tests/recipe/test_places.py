"""Files that a recipe names are found beside it, or in the working directory; a run holds what was taken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from practicum.cli import app
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.rollout_sections import ToolSection
from practicum.recipe.user_functions import import_function
from practicum.trainer.run import train_loaded

ROW = '{"prompt": "ab=", "answer": "b"}\n'
RECIPE = """name: own
model: {random_init: {hidden: 32, layers: 1, context: 64}}
tasks: {mine: {file: rows.jsonl}}
reward: {functions: [{use: "scores_of_mine:score"}]}
rollout: {samples: 2, max_new_tokens: 4}
train: {steps: 1, prompts: 1}
"""


def put(folder: Path, value: float = 1.0) -> Path:
    """A folder with a recipe, its data and its reward."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text(ROW)
    (folder / "helper_of_mine.py").write_text(f"VALUE = {value}\n")
    (folder / "scores_of_mine.py").write_text(
        "import helper_of_mine\n\ndef score(sample):\n    return helper_of_mine.VALUE\n"
    )
    (folder / "own.yaml").write_text(RECIPE)
    return folder / "own.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from below is forgotten afterwards."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.endswith("_of_mine")]:
        del sys.modules[name]


def test_a_folder_with_recipe_data_and_reward_runs_from_anywhere_and_resumes_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = put(tmp_path / "project")
    run = tmp_path / "run"
    train_loaded(load_recipe(own), run)
    held = yaml.safe_load((run / "recipe.yaml").read_text())
    assert held["tasks"]["mine"]["file"] == str(own.parent / "rows.jsonl")
    assert held["reward"]["functions"][0]["use"] == f"{own.parent}/scores_of_mine:score"
    monkeypatch.chdir(own.parent)
    assert train_loaded(load_recipe("own.yaml", ["train.steps=2"]), run, resume=True).steps == 2
    monkeypatch.chdir(tmp_path)
    assert load_recipe(run / "recipe.yaml").recipe.tasks["mine"].file == held["tasks"]["mine"]["file"]


def test_a_run_resumes_when_its_model_lies_beside_the_recipe_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # All recipes of `train a.yaml b.yaml` are loaded before the first has written its model.
    own = put(tmp_path / "project")
    monkeypatch.chdir(own.parent)
    later = own.with_name("later.yaml")
    later.write_text("extends: own.yaml\nname: later\nmodel: {path: runs/own/export}\n")
    before = load_recipe("later.yaml")
    assert before.recipe.model.path == "runs/own/export"
    assert "neither beside the recipe nor in the working directory" in str(before.places[0])
    train_loaded(load_recipe("own.yaml"))
    train_loaded(before)
    after = load_recipe("later.yaml", ["train.steps=2"])
    assert after.recipe.model.path == str(own.parent / "runs/own/export")
    assert train_loaded(after, resume=True).steps == 2


def test_what_is_not_beside_the_recipe_is_taken_from_the_working_directory(tmp_path: Path, elsewhere: Path):
    own = put(tmp_path / "project")
    (own.parent / "rows.jsonl").rename(elsewhere / "rows.jsonl")
    loaded = load_recipe(own)
    assert loaded.recipe.tasks["mine"].file == "rows.jsonl"
    assert "tasks.mine.file: rows.jsonl, in the working directory" in map(str, loaded.places)


def test_the_recipes_own_wins_over_the_working_directorys_and_check_says_so(tmp_path: Path, elsewhere: Path):
    own = put(tmp_path / "project")
    put(elsewhere)
    shown = " ".join(CliRunner().invoke(app, ["check", str(own), "--static"]).output.split())
    assert f"tasks.mine.file: {own.parent}/rows.jsonl, beside the recipe (not taken: rows.jsonl)" in shown
    assert f"{own.parent}/scores_of_mine.py, beside the recipe (not taken: scores_of_mine.py)" in shown


def test_a_value_of_set_is_looked_for_in_the_working_directory_first(tmp_path: Path, elsewhere: Path):
    own = put(tmp_path / "project")
    (own.parent / "more.jsonl").write_text(ROW)
    (elsewhere / "rows.jsonl").write_text(ROW)
    file = load_recipe(own, ["tasks.mine.file=rows.jsonl"]).recipe.tasks["mine"].file
    assert file == "rows.jsonl"
    file = load_recipe(own, ["tasks.mine.file=more.jsonl"]).recipe.tasks["mine"].file
    assert file == str(own.parent / "more.jsonl")


def test_a_base_finds_its_files_beside_itself(tmp_path: Path):
    own = put(tmp_path / "project")
    above = tmp_path / "above" / "run.yaml"
    above.parent.mkdir()
    above.write_text("extends: ../project/own.yaml\nname: above\n")
    assert load_recipe(above).recipe.tasks["mine"].file == str(own.parent / "rows.jsonl")


def test_models_and_loops_and_tools_are_found_too_but_not_a_servers_name(tmp_path: Path):
    folder = tmp_path / "project"
    put(folder)
    for name in ("student", "teacher"):
        (folder / name).mkdir()
    (folder / "own.yaml").write_text(
        "name: own\nmodel: {path: student}\ntasks: {sort: {kind: sort}}\n"
        "teachers:\n  a: {model: teacher}\n"
        "  b: {model: teacher, url: 'http://127.0.0.1:1/v1', tokenizer: student}\n"
        "route: {map: {sort: {a: 1, b: 1}}}\ndistill: {}\nreward: {weight: 0.0}\n"
        "agent: {loop: 'scores_of_mine.py:score', tools: ['scores_of_mine:score']}\n"
    )
    recipe = load_recipe(folder / "own.yaml").recipe
    assert recipe.model.path == str(folder / "student")
    assert [recipe.teachers[name].model for name in "ab"] == [str(folder / "teacher"), "teacher"]
    assert recipe.teachers["b"].tokenizer == str(folder / "student")
    (tool,) = recipe.agent.tools
    assert isinstance(tool, ToolSection)
    assert recipe.agent.loop == tool.use == f"{folder}/scores_of_mine:score"


def test_modules_of_one_name_in_two_folders_are_reported_apart(tmp_path: Path):
    uses = [
        load_recipe(put(tmp_path / name, value)).recipe.reward.functions[0].use
        for name, value in (("first", 1.0), ("second", 2.0))
    ]
    first = import_function(uses[0], "reward")
    second = import_function(uses[1], "reward")
    assert (first(None), second(None)) == (1.0, 2.0)  # each by the helper beside it
    assert import_function(uses[0], "reward")(None) == 1.0
