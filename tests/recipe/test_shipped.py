"""`practicum recipes` and `practicum init`: what is copied is whole, and loads where it lies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.shipped import list_recipes, shipped_recipes


def run(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_is_listed_with_what_it_shows_and_expects():
    shown = run("recipes")
    files = {f"{file.parent.name}/{file.stem}" for file in shipped_recipes().rglob("*.yaml")}
    listed = {recipe.name: recipe for group in list_recipes().values() for recipe in group}
    assert listed.keys() == files
    for recipe in listed.values():
        assert recipe.about, recipe.name
        if recipe.name == "agent/guessing":  # it shows what does not work
            continue
        assert recipe.expected, recipe.name
        assert f"  {recipe.name}: {recipe.about}\n    expected: {recipe.expected}\n" in shown


@pytest.mark.parametrize("folder", list_recipes())
def test_a_copied_folder_loads_to_the_same_recipes_where_it_lies(folder: str):
    assert "practicum check --static here/" in run("init", folder, "here")
    readme = Path("here/README.md").read_text()
    named = sorted(set(re.findall(r"here/[\w/-]+\.(?:yaml|py)", readme)))
    assert f"here/{folder}" not in readme
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert not [link for link in links if not (Path("here") / link).exists()], "no link leads nowhere"
    assert "recipes/" not in "".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    assert not [name for name in named if not Path(name).is_file()], "its commands name files that are there"
    copies = sorted(map(str, Path("here").glob("*.yaml")))
    checked = {*copies, *(name for name in named if name.endswith(".yaml"))}
    assert run("check", "--static", *checked).count("ok (static part only)") == len(checked)
    for copy in copies:
        own, shipped = load_recipe(copy), load_recipe(shipped_recipes() / folder / Path(copy).name)
        there = shipped.recipe.model_dump_json(exclude={"extends"})
        there = there.replace(str(shipped_recipes() / folder), str(Path("here").absolute()))
        assert own.recipe.model_dump_json(exclude={"extends"}) == there
        assert not [place for place in own.places if ": /" in place], "nothing is taken from elsewhere"


def test_one_recipe_comes_with_what_it_extends():
    run("init", "sort/ppo", "here")
    assert {file.name for file in Path("here").glob("*.yaml")} == {"ppo.yaml", "grpo.yaml"}
    run("check", "--static", "here/ppo.yaml")


def test_the_folder_is_the_recipes_name_if_none_is_given():
    run("init", "sort")
    assert Path("sort/grpo.yaml").is_file()


def test_nothing_is_written_over():
    Path("here").mkdir()
    Path("here/student.yaml").write_text("mine")
    assert "here/student.yaml already exists" in run("init", "mopd", "here", exit_code=2)
    assert [file.name for file in Path("here").iterdir()] == ["student.yaml"]
    assert Path("here/student.yaml").read_text() == "mine"


def test_a_name_that_is_none_is_refused_with_the_nearest():
    assert "did you mean mopd?" in run("init", "mopdd", exit_code=2)
    assert "did you mean sort/grpo?" in run("init", "sort/grpoo", exit_code=2)
