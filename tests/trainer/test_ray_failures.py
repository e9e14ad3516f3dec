"""kill -9 of each kind of process: the run goes on as if nothing was, or stops with a name and resumes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from practicum.errors import PracticumError
from practicum.recipe.load import LoadedRecipe, load_recipe
from practicum.runtime.cluster.group import TrainGroup
from practicum.runtime.cluster.roles import RayRoles
from practicum.trainer.run import train_loaded
from practicum.trainer.step import StepRunner
from tests.cluster import local_ray
from tests.teachers.judging import save_classifier
from tests.teachers.schools import save_teacher, school

from . import orders
from .recipes import TINY, tiny
from .test_ray import STEPS, assert_same_run, on_ray

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]

MORTAL: dict[str, Any] = {
    "reward": {"functions": [{"use": "tests.trainer.rewards:mortal"}]},
    "agent": {"loop": "tests.trainer.loops:mortal"},
    "train": STEPS,
    "rollout": TINY["rollout"] | {"deadline_s": 90},
    "checkpoint": {"every": 1},
}


@pytest.fixture(scope="module", autouse=True)
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ[orders.FOLDER] = str(tmp_path_factory.mktemp("orders"))  # before: workers inherit it
    try:
        with local_ray(cpus=12):
            yield
    finally:
        del os.environ[orders.FOLDER]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    train_loaded(tiny(folder, **MORTAL), folder / "run")
    return folder / "run"


@pytest.fixture(autouse=True)
def nothing_stays(ray_cluster: None) -> Iterator[None]:
    """No actor and no room of the cluster is left, however a run ended."""
    yield
    deadline = time.monotonic() + 20
    while (held := _held()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not held


def _held() -> list[str]:
    from ray._private.state import actors  # the public way needs the dashboard

    left = [f"{a['ActorClassName']}: {a['State']}" for a in actors().values() if a["State"] != "DEAD"]
    groups = ray.util.placement_group_table().values()
    return left + [group["state"] for group in groups if group["state"] != "REMOVED"]


def mortal(**runtime: Any) -> dict[str, Any]:
    """The recipe on Ray; deadlines are short, but not for a machine that is busy."""
    ranks, store = runtime.pop("ranks", 1), runtime.pop("store", "ray")
    sections = on_ray(MORTAL, ranks=ranks, store=store)
    sections["rollout"] = MORTAL["rollout"] | {"replicas": 1}
    sections["runtime"] |= {"stage_s": 60, "store_s": 20} | runtime
    return sections


def before_steps(patch: pytest.MonkeyPatch, acts: dict[int, Callable[[RayRoles], object]]) -> None:
    """Let something happen to the roles just before a step."""
    whole = StepRunner.step

    def stepping(self: StepRunner, number: int) -> dict[str, float]:
        if number in acts and isinstance(self.roles, RayRoles):
            acts[number](self.roles)
        return whole(self, number)

    patch.setattr(StepRunner, "step", stepping)


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)


def freeze_and_kill(actor: Any, seconds: float = 1.0) -> None:
    """From now on it answers nobody, so that it is at work for certain when it is killed."""
    pid = pid_of(actor)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def in_the_update(rank: int) -> Callable[[RayRoles], None]:
    """Kill a rank of the learner when the others wait for its share of the gradients."""

    def act(roles: RayRoles) -> None:
        each = roles.group.each

        def calling(method: str, args: Any) -> Any:
            if method == "update_student":
                freeze_and_kill(roles.group.workers[rank])
            return each(method, args)

        roles.group.each = calling

    return act


def before_stage(method: str, name: str) -> Callable[[RayRoles], None]:
    """Kill an actor of the store just before this stage of the learner, which reads from it."""

    def act(roles: RayRoles) -> None:
        each = roles.group.each

        def calling(called: str, args: Any) -> Any:
            if called == method:
                os.kill(pid_of(roles.handle.actors()[name]), signal.SIGKILL)
            return each(called, args)

        roles.group.each = calling

    return act


def in_the_rollout(name: str) -> Callable[[RayRoles], None]:
    """Kill an actor of the store when sessions are on their way to it."""
    return lambda roles: freeze_and_kill(roles.handle.actors()[name])


STOPS: dict[str, tuple[dict[str, Any], Callable[[RayRoles], object], str]] = {
    "learner": ({}, in_the_update(0), "rank 0 of 1 of the learner died"),
    "rank 1 of 2": ({"ranks": 2}, in_the_update(1), "rank 1 of 2 of the learner died"),
    "index": ({}, in_the_rollout("the store's index"), "the store's index died"),
    "storage unit": (
        {"store": "transferqueue"},
        before_stage("update_student", "TransferQueue's storage unit 0"),
        "TransferQueue's storage unit 0 died; its rows are lost",
    ),
    "transferqueue controller": (
        {"store": "transferqueue"},
        in_the_rollout("TransferQueue's controller"),
        "TransferQueue's controller died",
    ),
    "too many deaths": (
        {"max_deaths": 0},
        lambda _: orders.order("rollout"),
        "rollout: 1 deaths of workers, more than runtime.max_deaths = 0; the last: a rollout worker died",
    ),
}


@pytest.mark.parametrize("who", STOPS)
def test_a_death_that_ends_the_run_is_named_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, who: str
):
    runtime, kill, named = STOPS[who]
    with monkeypatch.context() as patch:
        before_steps(patch, {2: kill})
        with pytest.raises(PracticumError) as raised:
            train_loaded(tiny(tmp_path, **mortal(**runtime)), tmp_path / "cut")
    assert named in str(raised.value)
    assert any("a checkpoint of step 1: --resume goes on" in note for note in raised.value.__notes__)
    train_loaded(tiny(tmp_path, **MORTAL), tmp_path / "cut", resume=True)
    assert_same_run(whole, tmp_path / "cut", 1e-6)
