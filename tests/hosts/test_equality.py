"""Runs on four hosts have the numbers of the same recipes in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.recipe.load_recipe import load_recipe
from practicum.trainer.run import train_loaded
from tests.hosts.network import require
from tests.hosts.ray_hosts import RayHosts
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe
from tests.trainer.recipes import TINY
from tests.trainer.test_ray import GRPO, PPO, STEPS, assert_same_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
RUN_S = 240.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """The controller, the learner, the replicas with the rewards, and the teachers have one host each.

    All of them see the folder of the tests' runs, as they would see a network file system.
    """
    require()
    cpus = {"head": 0, "learner": 2, "rollout": 3, "teacher": 3}
    with RayHosts(cpus, [tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("teachers")
    return {
        name: save_teacher(folder / name, seed=n, hidden=32 + 16 * n) for n, name in enumerate(("a", "b"))
    }


def assert_equal(hosts: RayHosts, folder: Path, sections: dict[str, Any], ranks: int, **runtime: Any) -> None:
    """Train here, then on the hosts, and compare: bit for bit with one rank, else within 1e-6."""
    path, spread = folder / "recipe.yaml", folder / "spread.yaml"
    path.write_text(yaml.safe_dump(TINY | sections))
    train_loaded(load_recipe(path), folder / "here")
    pools = {"train": {"devices": ranks}, "rollout": {"devices": 1}}
    cluster = {"kind": "ray", "address": hosts.address, "threads": 1} | runtime
    spread.write_text(yaml.safe_dump(TINY | sections | {"runtime": cluster, "pools": pools}))
    before = {name: host.bytes() for name, host in hosts.hosts.items()}
    hosts.practicum("train", str(spread), "--out", "hosts", timeout=RUN_S, cwd=folder)
    for name in ("learner", "rollout"):  # weights and rows have crossed the network
        assert all(new - old > 50_000 for old, new in zip(before[name], hosts[name].bytes(), strict=True))
    assert_same_run(folder / "here", folder / "hosts", 0.0 if ranks == 1 else 1e-6)


@pytest.mark.parametrize("store", ["ray", "transferqueue"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rewards(hosts: RayHosts, tmp_path: Path, ranks: int, store: str):
    assert_equal(hosts, tmp_path, GRPO if ranks == 1 else PPO, ranks, store=store)


def test_a_lag(hosts: RayHosts, tmp_path: Path):
    assert_equal(hosts, tmp_path, GRPO | {"rollout": TINY["rollout"] | {"lag": 1}}, 1)


def test_an_agent_with_tools(hosts: RayHosts, tmp_path: Path):
    agent = {"loop": "tests.trainer.loops:uneven"}
    assert_equal(hosts, tmp_path, GRPO | {"agent": agent}, 1)


@pytest.mark.parametrize("placement", ["colocated", "own"])
def test_teachers(hosts: RayHosts, tmp_path: Path, teachers: dict[str, str], placement: str):
    placed = {name: {"model": path, "placement": placement} for name, path in teachers.items()}
    route = {"by": "task", "to": {"copy": "a", "compare": "b"}}
    recipe = teachers_recipe(teachers=placed, route=route, distill={"signal": "full"}, train=STEPS)
    assert_equal(hosts, tmp_path, recipe, 1)
