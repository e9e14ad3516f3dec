"""Clusters started, joined, refused and left, with a real Ray."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import ENV, descendants, still_running

from practicum.errors import ClusterError, MissingExtraError
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.ray import cluster as cluster_module
from practicum.runtime.ray.cluster import Cluster
from practicum.runtime.ray.init_ray import workers_environment

os.environ.update(ENV)
import ray

HERE = ("runtime.cpus=4",)


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "run.yaml"
    path.write_text("name: run\nmodel: {random_init: {}}\ntasks: {sort: {kind: sort}}\nruntime: ray\n")
    return load_recipe(path, overrides).recipe


def refused(wanted: Recipe) -> str:
    with pytest.raises(ClusterError) as caught:
        Cluster.open(wanted, make_plan(wanted))
    return str(caught.value)


@ray.remote
class Worker:
    """Says where it is."""

    def where(self) -> tuple[int, str, str, Any]:
        context = ray.get_runtime_context()
        return (
            os.getpid(),
            context.get_node_id(),
            os.environ["OMP_NUM_THREADS"],
            context.get_placement_group_id(),
        )


def start(cluster: Cluster, role: str, index: int = 0) -> Any:
    actor = Worker.options(**cluster.options(role, index)).remote()
    cluster.register(actor, f"{role} {index}")
    return actor


def interrupted(wanted: Recipe, started: dict[int, str]) -> None:
    """A run that ends by Ctrl-C; `started` gets its processes."""
    with closing(Cluster.open(wanted)) as cluster:
        _, _, threads, _ = ray.get(start(cluster, "reward").where.remote(), timeout=60)
        assert threads == "1"
        started |= descendants()
        raise KeyboardInterrupt


def test_workers_find_the_users_modules_but_not_another_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    libraries, beside = f"{sys.prefix}/lib/python3/site-packages", f"{sys.prefix}-project"
    monkeypatch.setattr(sys, "path", ["", libraries, beside, beside])
    paths = workers_environment(1)["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(tmp_path), beside]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pools.train.devices=8"], ["wanted 9 CPUs, available 4 CPUs", "train: 8 × 1 CPU"]),
        (
            ["runtime.store=transferqueue", "pools.train.nodes=4"],
            ["wanted 10 CPUs, available 4 CPUs", "store: 5 × 1 CPU", "runtime.cpus to 10"],
        ),
        (["model.device=cuda"], ["wanted 2 CPUs and 1 GPU, available 4 CPUs\n"]),
    ],
)
def test_a_machine_that_is_too_small_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], words: list[str]
):
    before = descendants()
    text = refused(recipe(tmp_path, *HERE, *overrides))
    assert all(word in text for word in words), text
    assert not ray.is_initialized()
    assert descendants() == before


def test_an_address_where_nobody_listens_is_refused(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
        for address in (place, f"ray://{place}"):
            text = refused(recipe(tmp_path, f"runtime.address={address}"))
            assert f"can't connect to {address}" in text
            assert "ray start --head" in text
    assert "expected auto, host:port or ray://" in refused(recipe(tmp_path, "runtime.address=somewhere"))


def test_a_server_that_is_no_ray_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("practicum.runtime.ray.init_ray.HEALTH_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        text = refused(recipe(tmp_path, f"runtime.address={address}"))
    assert f"the server at {address} did not respond like Ray within 2 s" in text


def test_without_the_extra_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'practicum\[ray\]'"):
        Cluster.open(recipe(tmp_path))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_runs_one_after_another_leave_no_process_and_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_worker_niceness")
    before, shared = set(descendants()), set(os.listdir("/dev/shm"))
    wanted = recipe(tmp_path, *HERE, "runtime.cpus=5", "pools.train.devices=2", "runtime.threads=2")
    with closing(Cluster.open(wanted, make_plan(wanted))) as cluster:
        actors = [start(cluster, role, index) for role in ("train", "rollout") for index in range(2)]
        found = ray.get([actor.where.remote() for actor in actors], timeout=60)
        assert len({pid for pid, *_ in found}) == 4
        assert {threads for _, _, threads, _ in found} == {"2"}
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid, *_ in found} == {os.nice(0)}
        assert len({group for *_, group in found}) == 1  # colocated: one pool
        assert list(cluster.actors) == ["train 0", "train 1", "rollout 0", "rollout 1"]
        ray.kill(actors[0])  # a dead one does not hinder the end
        first = descendants()
    assert not ray.is_initialized()
    cluster.close()  # twice is once
    second = dict[int, str]()
    with pytest.raises(KeyboardInterrupt):
        interrupted(wanted, second)
    started = {pid: since for pid, since in (first | second).items() if pid not in before}
    assert len(started) > 10
    assert not still_running(started)
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.fixture
def machines() -> Iterator[Any]:
    """A running cluster of two nodes with 2 and 3 CPUs."""
    from ray.cluster_utils import Cluster as Machines

    store = 80 * 2**20
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": store}
    found = Machines(initialize_head=True, head_node_args=head)
    try:
        found.add_node(num_cpus=3, object_store_memory=store)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_existing_cluster_is_joined_with_each_group_on_one_machine_and_left(
    tmp_path: Path, machines: Any, monkeypatch: pytest.MonkeyPatch
):
    at = f"runtime.address={machines.address}"
    aligned = recipe(tmp_path, at, "pools.train={nodes: 2, devices: 2}")
    with closing(Cluster.open(aligned)) as cluster:
        workers = [start(cluster, "train", n) for n in range(4)]
        nodes = [node for _, node, *_ in ray.get([w.where.remote() for w in workers], timeout=90)]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert not ray.is_initialized()

    ray.init(address=machines.address, log_to_driver=False)
    with closing(Cluster.open(aligned)):
        monkeypatch.setattr(cluster_module, "PATIENCE_S", 1.0)
        text = refused(recipe(tmp_path, at))  # the first one holds all five CPUs
    assert "no room for all workers within 1 s" in text
    assert "wanted 2 CPUs, available 0 CPUs" in text
    assert ray.is_initialized()  # it was not this run that connected
    assert "wanted 7 CPUs, available 5 CPUs" in refused(recipe(tmp_path, at, "pools.train.devices=6"))
