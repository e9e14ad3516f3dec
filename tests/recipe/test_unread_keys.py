"""No key is ignored in silence: what a run does not read is declared, and refused or noted if it is set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.errors import RecipeErrors
from practicum.recipe.checks.unread_keys import unread_keys
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.schema.engine_sections import EngineChoice
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.section import ReadWhen, Section
from practicum.recipe.schema.teacher_sections import Held
from practicum.recipe.text.show_recipe import show_recipe
from practicum.recipe.text.type_text import sections_of
from practicum.trainer.run import train_loaded

BASE: dict[str, Any] = {
    "name": "run",
    "model": {"random_init": {"hidden": 16, "layers": 1, "heads": 2, "context": 64}},
    "tasks": {"sort": {"kind": "sort", "options": {"length": [2, 3]}}},
    "rollout": {"samples": 2, "max_new_tokens": 4, "max_num_seqs": 4},
    "train": {"steps": 1, "prompts": 2},
    "eval": {"rows": 2},
    "runtime": {"threads": 1},
}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "supervised": {"algorithm": {"loss": "supervised", "advantage": "none"}},
    "ppo": {"algorithm": {"advantage": "gae", "kl": {"place": "reward", "target": 0.1}}, "critic": {}},
    "corrected": {
        "algorithm": {"loss": "reinforce", "advantage": "remax", "kl": {"place": "loss"}, "mismatch": "token"}
    },
    "distilled": {
        "teachers": {"a": {"student": {}}, "b": {"student": {}, "prompt_prefix": "1"}},
        "route": {"map": {"sort": {"a": 1.0, "b": 1.0}}, "measure_every": 1},
        "distill": {},
        "reward": {"weight": 0.0},
        "train": {"steps": 1, "prompts": 2, "schedule": "cosine"},
    },
    "ahead": {"rollout": {"lag": 1, "max_new_tokens": 4}, "train": {"steps": 2, "prompts": 2}},
    "one teacher": {
        "teachers": {"a": {"student": {}}},
        "distill": {"divergence": "k1", "signal": "sampled", "apply_as": "advantage"},
        "reward": {"weight": 0.0, "log_only": True},
        "eval": {"rows": 0},
    },
}
UNSEEN = {
    "extends": "read while files are merged",
    "expected": "for people: the summary shows it",
    "teachers.a.model": "not allowed with student",
    "teachers.b.model": "not allowed with student",
}
"""Keys that no run of these reads; levels of checks are read when a check finds something."""


def write(folder: Path, sections: dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(BASE | sections))
    return path


def leaves(section: Section, path: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Path, and class and name, of every key of a recipe; sections with defaults are not keys themselves."""
    for name, info in type(section).model_fields.items():
        value, here = section.__dict__[name], f"{path}{name}"
        items = {here: value}
        if isinstance(value, dict):
            items = {f"{here}.{key}": item for key, item in value.items()}
        elif isinstance(value, list):
            items = {f"{here}[{number}]": item for number, item in enumerate(value)}
        for key, item in items.items():
            if isinstance(item, Section):
                yield from leaves(item, f"{key}.")
        if not isinstance(info.default, Section):
            yield here, (type(section).__name__, name)


def ignored_keys(loaded: LoadedRecipe, patch: pytest.MonkeyPatch) -> set[str]:
    """Keys that a run does not read, and that nothing declares to be unread."""
    declared = {key.path for key in unread_keys(loaded.recipe)}
    paths = dict(leaves(loaded.recipe))
    read: set[tuple[str, str]] = set()
    get = Section.__getattribute__

    def reading(section: Section, key: str) -> Any:
        read.add((type(section).__name__, key))
        return get(section, key)

    with patch.context() as reads:
        reads.setattr(Section, "__getattribute__", reading)
        train_loaded(loaded)
    return {path for path, key in paths.items() if key not in read} - declared - {*UNSEEN}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_reads_every_key_that_is_not_declared_unread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = {"rollout.max_num_seqs"} if name == "ahead" else set()  # read in the engine's process
    assert ignored_keys(load_recipe(write(tmp_path, RUNS[name])), monkeypatch) == elsewhere


URL = {"url": "http://127.0.0.1:1/v1", "model": "m"}
TEACHERS: list[dict[str, Any]] = [
    URL,
    {"model": "m"},
    {"model": "m", "engine": "vllm", "placement": {"own": {}}},
    {"model": "m", "placement": {"own": {}}},
]
MORE: list[dict[str, Any]] = [
    *({"teachers": {"t": teacher}, "distill": {}} for teacher in TEACHERS),
    {"teachers": {"t": TEACHERS[1]}, "distill": {"divergence": "jsd"}, "runtime": {"teachers_gb": 1.0}},
    {"model": {"random_init": {"family": "gpt2"}}},
    {"model": {"random_init": {"family": "qwen3_moe"}}},
    {"tasks": {"rows": {"file": "rows.jsonl", "rewards": [{"use": "my:reward"}]}}},
    {"tasks": {"rows": {"dataset": "rows", "map": "my:row"}}},
    {"tasks": {"sort": {"kind": "sort", "chat": True}}},
    {"agent": {"loop": "compress", "tools": ["calculator", "python"]}},
    {"agent": {"loop": "retry"}, "eval": {"samples": 2}, "refills": 4},
    {"agent": {"loop": {"command": ["true"]}}},
    {
        "algorithm": {"loss": "gspo", "advantage": "reinforce_pp"},
        "rollout": {"engine": "vllm", "max_new_tokens": 4},
    },
    {"runtime": {"kind": "ray", "store": "transferqueue"}},
    {"runtime": {"kind": "ray", "address": "auto"}, "teachers": {"t": TEACHERS[3]}, "distill": {}},
    {"reward": {"models": {"c": {"model": "m"}, "j": {"kind": "judge", **URL}}}},
    {"algorithm": RUNS["supervised"]["algorithm"], "eval": {"rows": 0}},
]


def declared_keys(section: type[Section], rules: tuple[ReadWhen, ...] = ()) -> Iterator[tuple[str, str]]:
    """Class and name of every key that says when it is read, itself or by its section."""
    for name, info in section.model_fields.items():
        own = (*rules, *(rule for rule in info.metadata if isinstance(rule, ReadWhen)))
        inner = sections_of(info.annotation)
        if own and not (inner and isinstance(info.default, Section)):
            yield section.__name__, name
        for child in inner:
            yield from declared_keys(child, own if isinstance(info.default, Section) else ())  # type: ignore


SHARED = (*Held.model_fields, *EngineChoice.model_fields)


def test_every_declaration_lets_its_key_be_read_and_tells_when_it_is_not(tmp_path: Path) -> None:
    read, unread = set(), set()
    for sections in (*RUNS.values(), *MORE):
        recipe = load_recipe(write(tmp_path, sections)).recipe
        without_reader = {key.path for key in unread_keys(recipe)}
        for path, key in leaves(recipe):
            (unread if path in without_reader else read).add(key)
    # Shared keys, such as dtype, are declared once: a student has no url with which they are not read.
    # No MCP server is the calculator, which has no time limit.
    declared = set(declared_keys(Recipe)) - {(name, key) for name in ("Model", "Rollout") for key in SHARED}
    declared.discard(("McpSection", "timeout_s"))
    assert len(declared) > 70
    assert declared - unread == set(), "never unread"
    assert declared - read == set(), "never read"


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"reward": {"functions": [{"timeout_s": 1.0}]}}, "reward.functions[0].timeout_s"),
        (
            {"agent": {"loop": "tool_use", "tools": [{"use": "calculator", "timeout_s": 1.0}]}},
            "agent.tools[0].timeout_s",
        ),
        (RUNS["one teacher"] | {"route": {"measure_every": 2}}, "route.measure_every"),
        ({"algorithm": {"loss": "reinforce", "old_logprobs": "recompute"}}, "algorithm.old_logprobs"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(tmp_path: Path, sections: dict[str, Any], path: str) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write(tmp_path, sections))
    assert [error.path for error in caught.value.errors] == [path]


def test_keys_for_other_runs_of_a_recipe_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path, {"algorithm": RUNS["supervised"]["algorithm"], "pools": {"train": {"devices": 2}}})
    text = show_recipe(load_recipe(path))
    for line in (
        r"samples: 2 +# file:\d+, not read with algorithm.loss supervised",
        r"devices: 2 +# file:\d+, not read with runtime.kind local",
        r"max_new_tokens: 4 +# file:\d+",
        r"top_p: 1.0 +# default",
    ):
        assert re.search(rf"^ +{line}$", text, re.MULTILINE), line
