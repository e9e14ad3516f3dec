"""Recipes in the docs load, code runs, data can be read, links lead somewhere."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Reward, Task
from practicum.sessions.loops import find_loop
from practicum.tasks.files import FileSource
from practicum.tasks.rewards import RewardFunctions
from practicum.tasks.scorers import RewardSample

from .pages import PAGES, ROOT, Block, all_blocks, write_files


@pytest.fixture
def folder(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory whose modules can be imported."""
    monkeypatch.syspath_prepend(str(empty_folder))
    return empty_folder


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_recipes_load(block: Block, folder: Path):
    write_files(block.page, folder)
    path = folder / (block.title or "recipe.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(block.text)
    assert load_recipe(path).recipe.name


@pytest.mark.parametrize("block", all_blocks("yml"), ids=str)
def test_manifests_are_yaml(block: Block):
    manifest = yaml.safe_load(block.text)
    assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()


@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_code_runs(block: Block, folder: Path):
    exec(compile(block.text, str(block), "exec"), {"__name__": "block"})


@pytest.mark.parametrize("block", all_blocks("jsonl"), ids=str)
def test_rows_are_good(block: Block, folder: Path):
    (folder / "rows.jsonl").write_text(block.text)
    assert len(FileSource("rows.jsonl", needs_answer=True)) == len(block.text.splitlines())


def test_the_rewards_of_the_docs_judge(folder: Path):
    write_files(ROOT / "docs/tasks.md", folder)
    reward: Reward = load_recipe("recipes/letters.yaml").recipe.reward
    task = Task(file="data/train.jsonl")
    sample = RewardSample("cab=", "abc", "abc", {}, "letters", "short", "stop", "prompt 0", 4)
    longer = RewardSample("cab=", "abcd", "abc", {}, "letters", "short", "length", "prompt 1", 5)
    judged = asyncio.run(RewardFunctions({"letters": task}, reward).score([sample, longer]))
    assert [j.failure for j in judged] == [None, None]
    assert judged[0].parts == {"checker": 1.0, "brief": 0.2, "asked": 1.0, "ranked": 1.0}
    assert judged[1].parts == {"checker": 0.0, "brief": 1 / 6, "asked": 0.0, "ranked": 0.0}
    defined = inspect.getmembers(importlib.import_module("my_rewards"), inspect.isfunction)
    assert {f"my_rewards:{name}" for name, _ in defined} < {function.use for function in reward.functions}


def test_the_loop_of_the_docs_is_found(folder: Path):
    write_files(ROOT / "docs/sessions.md", folder)
    loop = load_recipe("recipes/second-thoughts.yaml").recipe.agent.loop
    assert find_loop(loop).__name__ == "second_thoughts"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_the_repository_exist(page: Path):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing
