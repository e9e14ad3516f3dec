"""Runs on several hosts have the numbers of the same recipes in this process, and refuse what can't work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.recipe.load_recipe import load_recipe
from practicum.trainer.run import train_loaded
from tests.hosts.network import require
from tests.hosts.ray_hosts import HOST_ENV, RayHosts
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe
from tests.trainer.recipes import TINY
from tests.trainer.test_ray import GRPO, PPO, STEPS, assert_same_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
RUN_S = 240.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """The controller's host and seven with one CPU each, so that no two workers share a host.

    All of them see the folder of the tests' runs, as they would see a network file system.
    """
    require()
    cpus = {"head": 0} | {f"worker{number}": 1 for number in range(7)}
    with RayHosts(cpus, [tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


def assert_equal(
    hosts: RayHosts,
    folder: Path,
    sections: dict[str, Any],
    *,
    store: str,
    ranks: int = 1,
    tolerance: float = 0.0,
    there: dict[str, Any] | None = None,
) -> None:
    """Train in this process, on Ray on one host, and on several, and compare the runs.

    `there` has the sections that change with the place.
    """
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(TINY | sections))
    train_loaded(load_recipe(path), folder / "here")
    pools = {"train": {"devices": ranks}, "rollout": {"devices": 1}}
    for name, where in (("one", {"cpus": 8}), ("hosts", {"address": hosts.address})):
        runtime = {"kind": "ray", "threads": 1, "store": store} | where
        changed = {"runtime": runtime, "pools": pools} | (there or {})
        path.write_text(yaml.safe_dump(TINY | sections | changed))
        before = {name: host.bytes() for name, host in hosts.hosts.items()}
        hosts.practicum("train", str(path), "--out", name, timeout=RUN_S, cwd=folder)
        assert_same_run(folder / "here", folder / name, tolerance)
    sent = [host.bytes()[1] - before[name][1] for name, host in hosts.hosts.items() if name != "head"]
    assert sum(count > 50_000 for count in sent) >= 2  # weights and rows have crossed the network


@pytest.mark.parametrize(("kind", "store"), [("GRPO", "ray"), ("GRPO", "transferqueue"), ("PPO", "ray")])
def test_two_ranks(hosts: RayHosts, tmp_path: Path, kind: str, store: str):
    assert_equal(hosts, tmp_path, {"GRPO": GRPO, "PPO": PPO}[kind], ranks=2, store=store, tolerance=1e-6)


@pytest.mark.parametrize("store", ["ray", "transferqueue"])
def test_an_agent_with_a_tool_and_a_lag(hosts: RayHosts, tmp_path: Path, store: str):
    agent = {"loop": "tests.trainer.loops:calculates", "tools": ["calculator"]}
    assert_equal(
        hosts, tmp_path, GRPO | {"agent": agent, "rollout": TINY["rollout"] | {"lag": 1}}, store=store
    )


@pytest.mark.parametrize("store", ["ray", "transferqueue"])
def test_teachers_on_the_learners_host_on_their_own_and_behind_a_url(
    hosts: RayHosts, tmp_path: Path, store: str
):
    models = {name: save_teacher(tmp_path / name, seed=n) for n, name in enumerate(("shared", "own", "url"))}
    server_host = hosts["worker5"]
    command = [sys.executable, "-m", "practicum", "serve", models["url"], "--host", server_host.address]
    here = {name: {"model": model} for name, model in models.items()}
    route = {"by": "task", "map": {"copy": {"shared": 0.5, "own": 0.5}, "compare": "url"}}
    recipe = teachers_recipe(route=route, distill={"signal": "top_k"}, train=STEPS | {"prompts": 8})
    there = here | {
        "own": here["own"] | {"placement": "own"},
        "url": {
            "url": f"http://{server_host.address}:8000/v1",
            "model": models["url"],
            "tokenizer": models["url"],
        },
    }
    with server_host.start([*command, "--no-key"], env=HOST_ENV, stdout=subprocess.PIPE) as server:
        try:
            assert any("8000" in line for line in server.stdout)  # it listens, or has ended
            taught = recipe | {"teachers": here}
            assert_equal(hosts, tmp_path, taught, store=store, there={"teachers": there}, tolerance=1e-6)
        finally:
            server.kill()


def test_a_host_that_does_not_see_the_run_folder_or_a_model_is_named(hosts: RayHosts, tmp_path: Path):
    """Only the head has /tmp/alone; the folder of the same name on another host is not the same."""
    student = save_teacher(tmp_path / "student", seed=0)
    hosts.head.run(["cp", "-r", student, "/tmp/student"], 10)
    hosts["worker1"].run(["mkdir", "-p", "/tmp/alone/run"], 10)
    runtime = {"kind": "ray", "address": hosts.address, "threads": 1}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(TINY | {"model": {"path": "/tmp/student"}, "runtime": runtime}))
    with pytest.raises(OSError, match="failed") as failed:
        hosts.practicum("train", str(recipe), "--out", "/tmp/alone/run", timeout=RUN_S, cwd=tmp_path)
    text = str(failed.value)
    for number in range(6):
        address = hosts[f"worker{number}"].address
        assert f"{address} does not have the run folder /tmp/alone/run" in text
        assert f"{address} does not have the model /tmp/student" in text
    assert "Traceback" not in text
