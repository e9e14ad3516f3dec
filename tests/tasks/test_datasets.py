"""Datasets of the `datasets` library, from folders, mapped by a user's function."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tests.sessions.sessions import byte_tokenizer

from practicum.errors import DataError, MissingExtraError, PracticumError, RecipeError
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import MakeModel, Model, Recipe, Task
from practicum.tasks.stream import eval_prompts, make_stream
from practicum.trainer.check_data import check_data

MAPS = """
def to_row(row):
    row["tags"].append("seen")
    return {"prompt": row["question"].strip(), "answer": row["solution"], "tags": row["tags"]}

def fails(row):
    return {"prompt": row["questoin"]}

def returns_nothing(row):
    row["prompt"] = row["question"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A dataset of two splits in a folder, and functions beside it."""
    folder = tmp_path_factory.mktemp("datasets")
    (folder / "sums").mkdir()
    for split, count in (("train", 10), ("test", 4)):
        rows = [{"question": f" {split}{n}? ", "solution": str(n), "tags": ["a"]} for n in range(count)]
        (folder / "sums" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "maps_of_sums.py").write_text(MAPS)
    yield folder
    sys.modules.pop("maps_of_sums", None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "hf")
    monkeypatch.setattr(sys, "path", list(sys.path))


def task(folder: Path, **keys: Any) -> Task:
    given = {"dataset": str(folder / "sums"), "map": f"{folder}/maps_of_sums:to_row", **keys}
    return Task(**given)


def checked(task: Task) -> list[str]:
    recipe = {
        "name": "r",
        "model": Model(random_init=MakeModel()),
        "tasks": {"sums": task},
        "train": {"prompts": 1},
    }
    return check_data(Recipe.model_validate(recipe), byte_tokenizer("chatml"), 1000).findings


def test_rows_of_a_folder_are_mapped_shuffled_and_evaluated(folder: Path):
    sums = task(folder, eval_split="test")
    first, second = (make_stream({"sums": sums}, 0).take(20)[e : e + 10] for e in (0, 10))
    assert sorted(p.index for p in first) == sorted(p.index for p in second) == list(range(10))
    assert [p.index for p in first] != [p.index for p in second]
    assert all(p.content == f"train{p.index}?" and p.answer == str(p.index) for p in first + second)
    assert {tuple(p.row["tags"]) for p in first + second} == {("a", "seen")}
    assert [p.content for p in eval_prompts({"sums": sums}, 3, 0)] == ["test0?", "test1?", "test2?"]
    assert checked(sums)[:2] == [
        f"tasks.sums: {folder}/sums (train) has 10 rows",
        f"tasks.sums: {folder}/sums (test) has 4 rows",
    ]


def test_a_changed_map_or_dataset_is_noticed_when_a_run_resumes(folder: Path, tmp_path: Path):
    saved = make_stream({"sums": task(folder)}, 0).state_dict()
    make_stream({"sums": task(folder)}, 0).load_state_dict(saved)
    (tmp_path / "maps_of_sums.py").write_text(MAPS.replace(".strip()", ""))
    other = task(folder, map=f"{tmp_path}/maps_of_sums:to_row")
    with pytest.raises(PracticumError, match="differ from the checkpoint"):
        make_stream({"sums": other}, 0).load_state_dict(saved)


def test_what_save_to_disk_wrote_is_read(tmp_path: Path):
    data = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}])})
    data.save_to_disk(tmp_path / "saved")
    saved = Task(dataset=str(tmp_path / "saved"))
    assert make_stream({"t": saved}, 0).prompt(3).row == {"prompt": "a", "answer": "1"}
    with pytest.raises(RecipeError, match=r"split 'test'"):
        make_stream({"t": Task(dataset=str(tmp_path / "saved"), split="test")}, 0)


def test_a_map_also_changes_rows_of_files(folder: Path):
    rows = Task(file=f"{folder}/sums/tr*.jsonl", map=f"{folder}/maps_of_sums:to_row")
    prompt = make_stream({"t": rows}, 0).prompt(0)
    assert prompt.content == f"train{prompt.index}?"


def test_a_map_that_raises_shows_the_users_line(folder: Path):
    with pytest.raises(DataError) as caught:
        make_stream({"t": task(folder, map=f"{folder}/maps_of_sums:fails")}, 0)
    text = str(caught.value)
    assert text.startswith(f"{folder}/sums (train), row 1: tasks.t.map {folder}/maps_of_sums:fails raised")
    assert "KeyError: 'questoin'" in text
    assert 'return {"prompt": row["questoin"]}' in text
    with pytest.raises(DataError, match="returns_nothing returned None, expected a dict with the columns"):
        make_stream({"t": task(folder, map=f"{folder}/maps_of_sums:returns_nothing")}, 0)
    with pytest.raises(RecipeError, match=r"tasks\.t\.map: .*\n.*did you mean maps_of_sums:to_row"):
        make_stream({"t": task(folder, map=f"{folder}/maps_of_sums:torow")}, 0)
    with pytest.raises(RecipeError, match=r"tasks\.t\.map: .*\n.*did you mean maps_of_sums:to_row"):
        make_stream({"t": task(folder, map="maps_of_sums.to_row")}, 0)


def test_what_is_wrong_with_a_dataset_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RecipeError) as caught:
        make_stream({"t": task(folder, split="trian")}, 0)
    assert "split 'trian', expected a dataset that can be read" in str(caught.value)
    assert "test" in caught.value.suggestion
    with pytest.raises(DataError, match=r"set tasks\.t\.prompt: question"):
        make_stream({"t": task(folder, map=None)}, 0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"tasks\.t\.dataset needs an extra: .*practicum\[datasets\]"):
        make_stream({"t": task(folder, subset="none-like-it")}, 0)


def test_a_dataset_of_a_recipe_is_found_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    tasks = "{s: {dataset: sums, map: 'maps_of_sums:to_row'}, f: {file: [sums/te*.jsonl], prompt: question}}"
    (folder / "run.yaml").write_text(f"name: r\nmodel: {{random_init: {{}}}}\ntasks: {tasks}\n")
    loaded = load_recipe(folder / "run.yaml")
    sums, files = loaded.recipe.tasks["s"], loaded.recipe.tasks["f"]
    assert (sums.dataset, sums.map) == (f"{folder}/sums", f"{folder}/maps_of_sums:to_row")
    assert files.file == [f"{folder}/sums/te*.jsonl"]
    replaced = load_recipe(folder / "run.yaml", ["tasks.s.kind=sort"]).recipe.tasks["s"]
    assert (replaced.kind, replaced.dataset, replaced.map) == ("sort", None, None)
