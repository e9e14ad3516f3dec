"""Recipes in the docs load, code runs, data can be read."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml

from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe, Task
from practicum.sessions.attempts import find_loop
from practicum.tasks.locations import Location, open_rows
from practicum.tasks.rewards import RewardFunctions
from practicum.tasks.scorers import RewardSample
from practicum.tasks.stream import eval_prompts, make_stream

from .pages import ROOT, Block, all_blocks, blocks_of


def load_block(block: Block, folder: Path) -> Recipe:
    """A block as a recipe: a file of the repository, keys added to one of its recipes, or a whole one."""
    if block.title:
        return load_recipe(ROOT / block.title).recipe
    path = folder / "recipe.yaml"
    base = ""
    if block.base:
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        path = (folder / block.base).with_name("block.yaml")
        base = f"extends: {Path(block.base).name}\n"
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
    (block,) = [block for block in all_blocks("yaml") if block.base == "recipes/own_data/grpo.yaml"]
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
    (recipe,) = [block for block in all_blocks("yaml") if "gsm8k" in block.text]
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


def test_the_loop_of_the_docs_is_found(empty_folder: Path):
    loop = load_recipe(ROOT / "recipes/sort/second_thoughts.yaml").recipe.agent.loop
    assert find_loop(loop).__name__ == "second_thoughts"
