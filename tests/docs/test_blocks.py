"""Files and links of the docs lead somewhere, recipes load, code runs, data can be read."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from practicum.cli import app
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.rewards.reward_functions import RewardSample
from practicum.rewards.score_functions import RewardFunctions
from practicum.tasks.rows import open_rows
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.tasks.tables import Location

from .pages import PAGES, ROOT, Block, Command, all_blocks, blocks_of

_NAMED = re.compile(r"(?<![\w/.-])((?:recipes|examples|docs|src|tests|benchmarks)/[\w./*-]+)")
EXAMPLE = ROOT / "examples/one_file.py"


def missing(text: str, folder: Path = ROOT) -> list[str]:
    """The paths below the repository's folders that a text names and that do not exist. In the README of a
    folder of recipes (`folder`), `name.yaml` in backticks is a file beside it."""
    named = {path.rstrip("./") for path in _NAMED.findall(text)}
    absent = [path for path in named if not any(ROOT.glob(path))]
    if folder.parent == ROOT / "recipes":
        beside = re.findall(r"`([\w-]+\.(?:yaml|py))`", text)
        absent += [name for name in beside if not (folder / name).is_file()]
    return sorted(absent)


def help_texts() -> dict[str, str]:
    """What `practicum COMMAND --help` prints, by command."""
    # One long line for each paragraph: a path is never broken.
    commands: list[str] = list(getattr(get_command(app), "commands"))  # noqa: B009
    lines = {"COLUMNS": "500", "TERMINAL_WIDTH": "500"}
    return {
        name: CliRunner().invoke(app, [*name.split(), "--help"], env=lines).output for name in ("", *commands)
    }


def help_commands() -> list[Command]:
    """The examples of the help texts, in the order in which they build on each other."""
    return [
        Command(f"practicum {name} --help", line.strip())
        for name, text in help_texts().items()
        for line in text.splitlines()
        if line.strip().startswith("practicum ")
    ]


PLACES = {
    **{str(page.relative_to(ROOT)): page for page in [*PAGES, ROOT / "CONTRIBUTING.md"]},
    **{str(file.relative_to(ROOT)): file for file in sorted((ROOT / "recipes").rglob("*.yaml"))},
}


@pytest.mark.parametrize("place", PLACES)
def test_files_that_a_page_names_exist(place: str):
    page = PLACES[place]
    assert not missing(page.read_text(), page.parent if page.suffix == ".md" else ROOT)


def test_files_that_the_help_names_exist():
    texts = help_texts()
    assert len(texts) > 8
    assert {name: missing(text) for name, text in texts.items() if missing(text)} == {}
    assert any("recipes/sort/start.yaml" in text for text in texts.values())


def test_blocks_with_a_title_are_files_of_the_repository():
    titled = [block for block in all_blocks() if block.title]
    assert titled
    for block in titled:
        file = ROOT / (block.title or "")
        assert file.is_file(), f"{block}: there is no {block.title}"
        assert file.read_text() == block.text, f"{block} is not what {block.title} says"


def test_the_readme_shows_the_demos_recipe():
    (block,) = [block for block in all_blocks("yaml") if block.page == ROOT / "README.md"]
    real = yaml.safe_load((ROOT / "recipes/mopd/student.yaml").read_text())
    shown = yaml.safe_load(block.text)
    assert shown == {key: value for key, value in real.items() if key in shown}
    assert real.keys() - shown.keys() <= {"expected", "out", "seed", "eval", "checkpoint", "track", "runtime"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if not link.startswith("http")]
    assert not [link for link in links if not (page.parent / link).exists()]


def load_block(block: Block, folder: Path) -> Recipe:
    """A block as a recipe: a file of the repository, keys added to one of its recipes, or a whole one."""
    if block.title:
        return load_recipe(ROOT / block.title).recipe
    path = folder / "recipe.yaml"
    base = ""
    if block.on or block.file:
        shutil.copytree(ROOT / "recipes", folder / "recipes")
    if block.on:
        path = (folder / block.on).with_name("block.yaml")
        base = f"extends: {Path(block.on).name}\n"
    for other in blocks_of(block.page):
        if other.file:
            path.with_name(other.file).write_text(other.text)
    path.write_text(base + block.text)
    return load_recipe(path).recipe


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_recipes_load(block: Block, empty_folder: Path):
    assert load_block(block, empty_folder).name


@pytest.mark.parametrize("block", all_blocks("yml"), ids=str)
def test_manifests_are_yaml(block: Block):
    manifest = yaml.safe_load(block.text)
    assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_code_runs(block: Block, empty_folder: Path, own_parts: None):
    exec(compile(block.text, str(block), "exec"), {"__name__": "block"})


@pytest.mark.parametrize("block", all_blocks("jsonl"), ids=str)
def test_rows_are_good(block: Block, empty_folder: Path):
    (empty_folder / "rows.jsonl").write_text(block.text)
    source = open_rows("t", Task(), Location(("rows.jsonl",)), needs_answer=True)
    assert len(source) == len(block.text.splitlines())


def test_the_rewards_of_the_docs_judge(empty_folder: Path):
    (block,) = [b for b in blocks_of(ROOT / "docs/tasks.md", "yaml") if b.on == "recipes/own_data/grpo.yaml"]
    recipe = load_block(block, empty_folder)
    sample = RewardSample("cab=", "abc", "abc", {}, "letters", "short", "stop", "prompt 0", 4)
    longer = RewardSample("cab=", "abcd", "abc", {}, "letters", "short", "length", "prompt 1", 5)
    results = asyncio.run(RewardFunctions(recipe.tasks, recipe.reward).score([sample, longer]))
    assert [result.failure for result in results] == [None, None]
    assert results[0].parts == {"checker": 1.0, "in_place": 1.0, "ended": 1.0, "shortest": 1.0}
    assert results[1].parts == {"checker": 0.0, "in_place": 0.75, "ended": 0.0, "shortest": 0.0}


def test_the_dataset_of_the_docs_is_read(empty_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """In place of the hub's, a folder of that name with its subset and splits."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", empty_folder / "cache")
    (recipe,) = [block for block in all_blocks("yaml") if "openai/gsm8k" in block.text]
    (code,) = [block for block in all_blocks("python") if 'name="my_rows.py"' in block.info]
    (empty_folder / "my_rows.py").write_text(code.text)
    data = Path("openai/gsm8k")
    data.mkdir(parents=True)
    (data / "README.md").write_text("---\nconfigs: [{config_name: main, data_dir: main}]\n---\n")
    (data / "main").mkdir()
    for split in ("train", "test"):
        row = {"question": f"{split}: 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
        (data / "main" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    tasks = load_block(recipe, empty_folder).tasks
    drawn = [make_stream(tasks, 0).prompt(0), *eval_prompts(tasks, 8, 0)]
    assert [(p.content, p.answer) for p in drawn] == [("train: 1 + 1?", "2"), ("test: 1 + 1?", "2")]


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--warmup", "10", "--steps", "2"])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert re.findall(r"^step +(\d+)  reward \d\.\d+", output, re.MULTILINE) == ["1", "2"]
    assert "warm-up  10" in output
    gaps = [float(gap) for gap in re.findall(r"gap (\S+)", output)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


def test_the_cells_of_the_notebook_run(empty_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = runpy.run_path(str(ROOT / "examples/notebook.py"))
    assert cells["run"].curve("reward/mean")[0] == [1, 2]
    assert (empty_folder / "runs/notebook/grpo/curves.png").stat().st_size > 10_000
    drawn = [line.get_label() for line in cells["right"].get_lines()]
    assert drawn == ["eval/greedy", "eval/mean@4", "eval/pass@4"]
    assert all(len(line.get_xdata()) == 2 for line in cells["right"].get_lines()), "steps 0 and 2"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_learns():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"first 5 steps (\d\.\d+), last 5 steps (\d\.\d+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 0.2, done.stdout
