"""Runs with a lag on Ray: the same as in this process, also when replicas die or the run is resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import PracticumError
from practicum.trainer.run import train_loaded
from tests.cluster import local_ray
from tests.teachers.tiny_teachers import MAKE, save_teacher

from . import kill_orders
from .recipes import TINY, tiny
from .test_ray import STEPS, assert_same_run, on_ray
from .test_ray_failures import Act, before_steps, pid_of
from .test_run import metrics_of, same_run, stop_after

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

LAG: dict[str, Any] = {
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
    "train": STEPS | {"steps": 5, "minibatches": 2},
    "rollout": TINY["rollout"] | {"deadline_s": 90, "lag": 2},
    "eval": {"rows": 2, "every": 2},
    "checkpoint": {"every": 1},
}


@pytest.fixture(scope="module", autouse=True)
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ[kill_orders.FOLDER] = str(tmp_path_factory.mktemp("orders"))  # before: workers inherit it
    try:
        with local_ray(cpus=12):
            yield
    finally:
        del os.environ[kill_orders.FOLDER]


def late_on_ray(sections: dict[str, Any], *, ranks: int = 1) -> dict[str, Any]:
    """The same on Ray, with two replicas on devices of their own."""
    found = on_ray(sections, ranks=ranks)
    found["runtime"]["max_deaths"] = 10
    return found | {"pools": found["pools"] | {"rollout": {"devices": 2}}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lag_on_ray_is_the_lag_here(tmp_path: Path, ranks: int):
    teacher = {"t": {"model": save_teacher(tmp_path / "teacher", seed=1), "placement": "own"}}
    taught = {"teachers": teacher, "distill": {"signal": "top_k", "top_k": 4}, "model": {"random_init": MAKE}}
    sections = LAG | (taught if ranks == 1 else {"agent": {"loop": "tests.trainer.loops:uneven"}})
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    train_loaded(tiny(tmp_path, **late_on_ray(sections, ranks=ranks)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 0.0 if ranks == 1 else 1e-6)
    assert [row["async/staleness"] for row in metrics_of(tmp_path / "ray")[1:]] == [0, 1, 2, 2, 2]


def test_a_replica_that_dies_is_restarted_with_the_weights_that_its_batches_need(tmp_path: Path):
    sections = LAG | {"agent": {"loop": "tests.trainer.loops:mortal"}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    ordered = []

    def order(row: dict[str, Any]) -> None:
        if row["step"] in (1, 2, 3):
            ordered.append(kill_orders.order("rollout"))

    train_loaded(tiny(tmp_path, **late_on_ray(sections)), tmp_path / "killed", on_step=order)
    assert ordered
    assert sum(row.get("cluster/deaths", 0) for row in metrics_of(tmp_path / "killed")) > 0
    _same_numbers(tmp_path / "whole", tmp_path / "killed")


def test_a_stopped_run_on_ray_continues_with_the_window(tmp_path: Path):
    loaded = tiny(tmp_path, **late_on_ray(LAG))
    train_loaded(loaded, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        train_loaded(loaded, tmp_path / "cut")
    train_loaded(loaded, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def frozen(actor: Any) -> None:
    """From now on it answers nobody."""
    os.kill(pid_of(actor), signal.SIGSTOP)


STOPPED: dict[str, tuple[Act, str]] = {
    "engine": (lambda roles: frozen(roles.pools.rollout.replicas()[0]), r"rollout"),
    "teacher": (lambda roles: frozen(roles.pools.teachers["t"].replicas()[0]), r"teacher t"),
    "learner": (lambda roles: frozen(roles.group.workers[0]), r"rank 0 of 1 of the learner"),
}


@pytest.mark.parametrize("who", STOPPED)
def test_whoever_stops_answering_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
):
    """Nobody may be restarted here, and the run ends long before the test's own deadline."""
    model = save_teacher(tmp_path / "teacher", seed=1)
    teacher = {"model": model, "placement": "own", "deadline_s": 10}
    taught = {
        "teachers": {"t": teacher},
        "distill": {"signal": "top_k", "top_k": 4},
        "model": {"random_init": MAKE},
    }
    late = {"train": STEPS | {"steps": 50}, "rollout": TINY["rollout"] | {"deadline_s": 20}}
    sections = late_on_ray(LAG | taught | late)
    sections["runtime"] |= {"stage_s": 20, "max_deaths": 0}
    act, named = STOPPED[who]
    before_steps(monkeypatch, {3: act})
    with pytest.raises(PracticumError, match=named):
        train_loaded(tiny(tmp_path, **sections), tmp_path / "run")


def _same_numbers(one: Path, other: Path) -> None:
    """Bit for bit, but for what a death or the clock makes."""
    told = ("time/", "shared/", "cluster/", "rollout/tokens_per_second")
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(told)} for row in metrics_of(folder)]
        for folder in (one, other)
    ]
    assert rows[0] == rows[1]
