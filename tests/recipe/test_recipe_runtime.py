"""Runtime and pools: short forms, what they come to, and what can't be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.errors import RecipeErrors
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.text.show_recipe import json_schema

Write = Callable[..., Path]
OWN = "teachers.t.model=a distill={} teachers.t.placement.own"
SPLIT = "rollout.engine=vllm rollout.vllm.tensor_parallel_size=2"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("runtime: ray", []),
        ("runtime: {kind: ray}", []),
        ("", ["runtime=ray"]),
        ("", ["runtime.kind=ray"]),
        ("runtime: local", ["runtime=ray"]),
        ("runtime: {kind: local}", ["runtime=ray"]),
    ],
)
def test_a_runtime_may_be_named_in_short(write: Write, text: str, overrides: list[str]) -> None:
    assert load_recipe(write(text), overrides).recipe.on_ray


def test_a_short_runtime_keeps_the_other_options_of_every_layer(write: Write) -> None:
    write("runtime: {threads: 3, max_deaths: 7}", "base.yaml", minimal=False)
    path = write("extends: base.yaml\nruntime: ray")
    loaded = load_recipe(path, ["runtime.threads=2", "runtime=local", "runtime.stage_s=9"])
    runtime = loaded.recipe.runtime
    assert (runtime.kind, runtime.threads, runtime.max_deaths, runtime.stage_s) == ("local", 2, 7, 9.0)
    assert str(load_recipe(path).origins["runtime.kind"]) == "file:6"
    assert str(load_recipe(path).origins["runtime.max_deaths"]) == "base base.yaml:1"


def test_a_misspelt_runtime_or_pool_is_reported_its_nearest_name(write: Write) -> None:
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write("runtime: rai\npools: {trian: {devices: 2}}"))
    text = str(caught.value)
    assert "runtime.kind: found 'rai' (file:5)" in text
    assert "did you mean ray?" in text
    assert "did you mean pools.train?" in text


def test_an_editor_takes_both_forms_of_a_runtime() -> None:
    kind, mapping = json.loads(json_schema())["$defs"]["Runtime"]["anyOf"]
    assert kind["enum"] == ["local", "ray"]
    assert mapping["properties"]["kind"]["enum"] == kind["enum"]


def test_ranks_and_engines_follow_from_the_pools(write: Write) -> None:
    path = write("pools: {train: {nodes: 2, devices: 3}}\n" + "runtime: {address: 'h:1'}")
    local = load_recipe(path).recipe  # what it says of a cluster may stay
    assert (local.data_parallel, local.engine_replicas) == (1, 1)
    on = ["runtime=ray", "runtime.store=transferqueue"]
    ray = load_recipe(path, on).recipe
    assert (ray.data_parallel, ray.engine_replicas) == (6, 6)
    own = load_recipe(path, [*on, "pools.rollout={devices: 4}"]).recipe
    assert (own.data_parallel, own.engine_replicas) == (6, 4)


def test_own_models_are_those_with_processes_here(write: Write) -> None:
    recipe = load_recipe(
        write(
            """
            teachers:
              a: {model: x, placement: own}
              b: {model: y}
              c: {url: "http://h/v1", model: z}
            distill: {}
            route: {map: {sort: {a: 1, b: 1, c: 1}}}
            reward: {models: {j: {model: m, placement: {own: {replicas: 2}}}}}
            """
        )
    ).recipe
    assert list(recipe.own_models) == ["teachers.a", "reward.models.j"]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ("runtime.address=auto runtime.cpus=4", "runtime.cpus"),
        ("model.device=cuda:1", "model.device"),
        (f"{OWN}={{}} teachers.t.device=cuda:0", "teachers.t.device"),
        (f"{SPLIT}", "rollout.vllm.tensor_parallel_size"),
        (f"{SPLIT} pools.rollout.devices=3", "rollout.vllm.tensor_parallel_size"),
        (
            "teachers.t.student={} teachers.t.engine=vllm teachers.t.vllm.tensor_parallel_size=2 distill={}",
            "teachers.t.vllm.tensor_parallel_size",
        ),
    ],
)
def test_what_a_cluster_could_not_use_is_refused(write: Write, overrides: str, path: str) -> None:
    options = overrides.split()
    load_recipe(write(), options)  # a run in one process does not read it
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(write(), [*options, "runtime=ray"])
    assert [error.path for error in caught.value.errors] == [path]


@pytest.mark.parametrize(
    "overrides", ["pools.train.devices=4", f"{SPLIT} pools.rollout.nodes=2 pools.rollout.devices=4"]
)
def test_what_a_cluster_can_use_is_taken(write: Write, overrides: str) -> None:
    assert load_recipe(write(), [*overrides.split(), "runtime=ray"]).recipe.on_ray
