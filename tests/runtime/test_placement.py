"""What a recipe wants of a cluster, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from practicum.errors import ClusterError
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.placement import Bundle, Needs, Node, needs, require_room

MINIMAL = "name: run\nmodel: {random_init: {}}\ntasks: {sort: {kind: sort}}\nruntime: {kind: ray}\n"
SCHOOL = """
teachers:
  big: {model: a, placement: {own: {replicas: 2, threads: 2}}, engine: vllm, vllm: {tensor_parallel_size: 3}}
  small: {model: b, placement: own}
  far: {url: "http://h/v1", model: c}
distill: {}
route: {map: {sort: {big: 1, small: 1, far: 1}}}
"""


def recipe(tmp_path: Path, *overrides: str, text: str = "") -> Recipe:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + text)
    return load_recipe(path, overrides).recipe


def test_colocated_roles_share_a_bundle(tmp_path: Path):
    wanted = needs(recipe(tmp_path, "pools.train.devices=2", "runtime.threads=2"), gpus=False)
    assert [(b.pool, b.cpus, b.gpus) for b in wanted.bundles] == [
        ("train", 2, 0),
        ("train", 2, 0),
        ("services", 1, 0),
    ]
    for rank in range(2):
        learner, engine = wanted.actor("train", rank), wanted.actor("rollout", rank)
        assert learner.bundle == engine.bundle == rank
        assert (learner.cpus, engine.cpus, learner.threads) == (1.0, 1.0, 2)
    assert wanted.cpus == 5
    assert wanted.actor("store").bundle is None


def test_a_device_is_a_gpu_where_there_are_some_and_the_model_takes_one(tmp_path: Path):
    assert needs(recipe(tmp_path), gpus=True).gpus == 1
    assert needs(recipe(tmp_path, "model.device=cpu"), gpus=True).gpus == 0
    assert needs(recipe(tmp_path, "model.device=cuda"), gpus=False).gpus == 1


def test_pools_of_their_own_and_services_are_counted(tmp_path: Path):
    school = recipe(
        tmp_path,
        "pools.rollout={devices: 2}",
        "runtime.store=transferqueue",
        "pools.train.nodes=2",
        "runtime.reward_workers=2",
        text=SCHOOL,
    )
    wanted = needs(school, gpus=False)
    by_pool = defaultdict(float)
    for bundle in wanted.bundles:
        by_pool[bundle.pool] += bundle.cpus
    assert by_pool == {"train": 2, "rollout": 2, "teachers": 2 * 6 + 1, "services": 2.1, "store": 3}
    assert [wanted.actor("teachers.big", n).cpus for n in range(2)] == [6, 6]
    assert wanted.actor("train").cpus == 1
    on_gpus = needs(school, gpus=True)
    big = on_gpus.bundles[on_gpus.actor("teachers.big").bundle or 0]
    assert (big.cpus, big.gpus) == (2, 3)


def test_an_engine_or_teacher_over_several_devices_asks_for_all_of_them_on_one_machine(tmp_path: Path):
    teacher = "{model: a, placement: own, engine: vllm, vllm: {tensor_parallel_size: 4}}"
    split = recipe(
        tmp_path,
        "rollout.engine=vllm",
        "rollout.vllm.tensor_parallel_size=2",
        "pools.rollout={nodes: 2, devices: 4}",
        "runtime.threads=3",
        text=f"teachers: {{t: {teacher}}}\ndistill: {{}}\n",
    )
    on_gpus, on_cpus = needs(split, gpus=True), needs(split, gpus=False)
    engines = [b for b in on_gpus.bundles if b.pool == "rollout"]
    assert [(b.group, b.gpus) for b in engines] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [on_gpus.actor("rollout", n).gpus for n in range(4)] == [2, 2, 2, 2]
    assert [b.cpus for b in on_cpus.bundles if b.pool == "rollout"] == [6] * 4
    assert on_gpus.actor("teachers.t").gpus == on_cpus.actor("teachers.t").cpus == 4


def test_a_refusal_says_who_wants_what_and_what_there_is(tmp_path: Path):
    wanted = needs(recipe(tmp_path, "pools.train.devices=8", "model.device=cuda"), gpus=True)
    with pytest.raises(ClusterError) as caught:
        require_room(wanted, [Node(4, 2), Node(16, 4)])
    text = str(caught.value)
    for words in (
        "wanted 9 CPUs and 8 GPUs, available 20 CPUs and 6 GPUs",
        "train: 8 × 1 CPU and 1 GPU",
        "8 rollout, 1 store, 8 train",
        "→ lower pools.train, runtime.reward_workers\n  → without GPUs",
    ):
        assert words in text, text


def test_a_replica_across_two_machines_is_refused_with_the_reason():
    wanted = Needs((), (Bundle("teachers", 0, 5.0), Bundle("teachers", 1, 1.0)))
    require_room(wanted, [Node(5), Node(1)])
    with pytest.raises(ClusterError, match="no machine has the resources"):
        require_room(wanted, [Node(4), Node(2)])
