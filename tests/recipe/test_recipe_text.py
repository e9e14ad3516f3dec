"""The resolved recipe and the reference as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.show_recipe import json_schema, markdown, resolved_yaml, show_recipe
from practicum.recipe.text.type_text import all_keys, sections_of

Write = Callable[..., Path]
RICH = """
extends: base.yaml
expected: {metric: "1e-5", at_least: 0.5}
rollout: {stop: ["=", "off", "# no comment"]}
train: {lr: 1e-5, max_grad_norm: null}
algorithm: {advantage: gae, kl: {place: loss}}
critic: {warmup_steps: 1}
reward: {functions: [{use: exact}, {use: contains, weight: 0.5}]}
teachers:
  a: {model: x, placement: {own: {replicas: 2}}}
  b: {student: {}, placement: own, prompt_prefix: "{answer}\\n"}
route: {by: task, map: {sort: {a: 0.7, b: 0.3}, more: b}, shares: {a: 0.5, b: 0.5}}
distill: {signal: full}
tasks: {more: {kind: add, options: {digits: [1, 2]}, system: "be: brief", chat: true}}
"""


def test_the_recipe_in_a_run_folder_loads_to_the_same_recipe(write: Write, tmp_path: Path) -> None:
    write("seed: 3", "base.yaml", minimal=False)
    text = RICH.replace("tasks: {", "tasks: {sort: {kind: sort}, ")
    path = write("name: run\nmodel: {random_init: {}}\n" + text, minimal=False)
    recipe = load_recipe(path, ["train.steps=7"]).recipe
    folder = tmp_path / "other" / "folder"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(resolved_yaml(recipe))
    again = load_recipe(folder / "recipe.yaml").recipe
    assert again == recipe.model_copy(update={"extends": None})
    assert recipe.seed == again.seed == 3


def test_the_shown_recipe_is_yaml_of_every_value_with_its_origin(write: Write) -> None:
    write("seed: 3", "base.yaml", minimal=False)
    loaded = load_recipe(write("extends: base.yaml\ntrain: {lr: 1e-5}\n"), ["rollout.stop=['#']"])
    text = show_recipe(loaded)
    assert yamlfile.parse(text, "shown").data == loaded.recipe.model_dump(mode="json")
    assert len([line for line in text.splitlines() if "  # " in line]) == len(loaded.origins)
    origins = {line.split(":")[0].strip(): line.rsplit("  # ")[-1] for line in text.splitlines()}
    assert origins["seed"] == "base base.yaml:1"
    assert origins["lr"] == "file:6"
    assert origins["stop"] == "--set"
    assert origins["autocast"] == "default"


def test_every_key_has_one_sentence() -> None:
    for path, info in all_keys():
        sentence = info.description or ""
        assert sentence.endswith("."), path
        assert "\n" not in sentence, path


def test_every_section_says_what_it_is() -> None:
    for path, info in all_keys():
        assert all(section.__doc__ for section in sections_of(info.annotation)), path


def test_the_reference_has_every_key_with_type_and_default() -> None:
    lines = markdown().splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert set(rows) == {path for path, _ in all_keys()}
    assert "a number, greater than 0 | `0.0001` | Peak learning rate." in rows["train.lr"]
    assert 'one of off, reward, loss | `"off"`' in rows["algorithm.kl.place"]
    assert "**required**" in rows["name"]
    assert "[{use: checker, weight: 1.0" in rows["reward.functions"]
    assert "tasks.<name>.kind" in rows
    assert "reward.functions[].weight" in rows
    assert "| one of colocated, own, or {own: …} | `colocated` |" in rows["teachers.<name>.placement"]
    assert "teachers.<name>.placement.own.replicas" in rows
    assert "| a mapping of names to teachers | `{}` |" in rows["teachers"]


def test_the_json_schema_is_json_and_closed() -> None:
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"name", "model", "tasks"}
    placement = schema["$defs"]["Teacher"]["properties"]["placement"]["anyOf"]
    assert placement == [{"enum": ["colocated", "own"], "type": "string"}, {"$ref": "#/$defs/OwnPlacement"}]


@pytest.mark.parametrize(
    ("overrides", "sessions", "updates", "words"),
    [
        ([], 256, 1, "32 prompts × 8 samples = 256 sessions per step"),
        (["train.epochs=2", "train.minibatches=4"], 256, 8, "64 sessions each"),
        (["algorithm.advantage=remax"], 256, 1, "and 32 greedy ones"),
        (["refills=4"], 256, 1, "refilled up to 4 times"),
        (["algorithm.loss=supervised", "algorithm.advantage=none"], 32, 1, "32 examples per"),
    ],
)
def test_the_sizes_of_a_step_follow_from_the_recipe(
    write: Write, overrides: list[str], sessions: int, updates: int, words: str
) -> None:
    counts = load_recipe(write(), overrides).recipe.counts
    assert (counts.sessions, counts.optimizer_steps) == (sessions, updates)
    assert words in "\n".join(counts.lines())
