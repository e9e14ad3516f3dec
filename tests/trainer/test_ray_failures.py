"""kill -9 of each kind of process: the run goes on as if nothing was, or stops with a name and resumes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.errors import ClusterError, DeadlineError, PracticumError
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.schema.recipe import Checks
from practicum.roles.run_stage import StepInfo
from practicum.runtime.ray import start_ray as start
from practicum.runtime.ray.actor_calls import WorkerDied
from practicum.runtime.ray.ray_roles import RayRoles, TrainGroup
from practicum.runtime.ray.workers import RayLearnerRank
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import TRAIN
from practicum.trainer.step import StepRunner
from tests.cluster import local_ray
from tests.teachers.tiny_reward_models import save_classifier
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe

from . import kill_orders
from .recipes import TINY, tiny
from .test_ray import STEPS, assert_same_run, on_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Act = Callable[[RayRoles], object]
MORTAL: dict[str, Any] = {
    "reward": {"functions": [{"use": "tests.trainer.rewards:mortal"}]},
    "agent": {"loop": "tests.trainer.loops:mortal"},
    "train": STEPS,
    "rollout": TINY["rollout"] | {"deadline_s": 90},
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


def fragile(
    sections: dict[str, Any], *, ranks: int = 1, store: str = "ray", deaths: int = 3
) -> dict[str, Any]:
    """The recipe on Ray; deadlines are short, but not for a machine that is busy."""
    found = on_ray(sections, ranks=ranks, store=store)
    found["rollout"] = dict(sections["rollout"])
    found["runtime"] |= {"stage_s": 60, "max_deaths": deaths}
    return found


def before_steps(patch: pytest.MonkeyPatch, acts: dict[int, Act]) -> None:
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


def at_the_update(act: Act) -> Act:
    """Let it happen just when the learner is to take the step."""

    def wait_for_it(roles: RayRoles) -> None:
        update = roles.stages["update_student"]

        def updating(step: StepInfo) -> Any:
            act(roles)
            roles.stages["update_student"] = update
            return update(step)

        roles.stages["update_student"] = updating

    return wait_for_it


def rank(number: int) -> Act:
    """Kill a rank of the learner when the others wait for its share of the gradients."""
    return at_the_update(lambda roles: freeze_and_kill(roles.group.workers[number]))


def store_actor(name: str) -> Act:
    """Kill an actor of the store when sessions are on their way to it."""
    return lambda roles: freeze_and_kill(roles.handle.actors()[name])


def survivor(folder: Path, place: str = "colocated", **sections: Any) -> LoadedRecipe:
    """A student that learns from a reward function, a reward model and a copy of itself, which grows old."""
    functions = [{"use": "tests.trainer.rewards:mortal"}]
    model = {"model": str(folder / "judge"), "label": 1, "placement": place, "deadline_s": 60}
    recipe = teachers_recipe(
        teachers={"self": {"student": {"every": 2}, "placement": place, "deadline_s": 60}},
        reward={"functions": functions, "models": {"judge": model}},
        agent={"loop": "tests.trainer.loops:mortal"},
        distill={},
        train=STEPS | {"steps": 4},
        **sections,
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.long
def test_a_run_goes_on_after_deaths_as_if_nobody_had_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_classifier(tmp_path / "judge")
    train_loaded(survivor(tmp_path), tmp_path / "local")
    kills: dict[int, Act] = {
        1: lambda _: kill_orders.order("rollout"),
        2: lambda _: kill_orders.order("reward"),
        3: lambda roles: freeze_and_kill(roles.cluster.actors["reward.models.judge 0"]),
        4: lambda roles: freeze_and_kill(roles.pools.teachers["self"].replicas()[0]),
    }
    before_steps(monkeypatch, kills)
    # Every put is an object of its own, as large ones are.
    monkeypatch.setattr(start, "start_ray_store", partial(start.start_ray_store, inline_bytes=0))
    sections = on_ray({"rollout": TINY["rollout"] | {"samples": 2}})
    sections["pools"]["rollout"] = {"devices": 2}
    train_loaded(survivor(tmp_path, "own", **sections), tmp_path / "ray")
    counted = take_counts(tmp_path / "ray")
    assert [deaths for deaths, _ in counted] == [0, 1, 1, 0, 1], "Ray itself starts a reward model again"
    assert [reruns > 0 for _, reruns in counted] == [False, True, True, False, True]
    assert_same_run(tmp_path / "local", tmp_path / "ray", 1e-6)


def take_counts(folder: Path) -> list[tuple[int, int]]:
    """Deaths and reruns in each line of the run's metrics; the lines are as if there had been none."""
    path, counts = folder / "metrics.jsonl", []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        counts.append((row.pop("cluster/deaths", 0), row.pop("cluster/reruns", 0)))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return counts


def test_the_rank_that_died_is_named_not_the_ones_that_lost_it():
    class Rank:
        """A rank that another one's death reaches before Ray tells of it."""

        def __init__(self, dies: bool) -> None:
            self.dies = dies

        def call(self, method: Any) -> None:
            if self.dies:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("Connection closed by peer")

    ranks: list[Any] = [ray.remote(Rank).remote(dies) for dies in (False, True)]
    group = TrainGroup(ranks, Watch(Checks(), print), 120.0)
    with pytest.raises(WorkerDied, match="rank 1 of 2 of the learner died"):
        group.each(RayLearnerRank.updates)
    with pytest.raises(RuntimeError, match="Connection closed"):
        group.first(RayLearnerRank.updates)
    ray.kill(ranks[0])


@pytest.mark.long
def test_rows_that_a_dead_replica_did_not_tell_of_are_cleared_and_too_many_deaths_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sections = {k: v for k, v in MORTAL.items() if k != "reward"} | {"algorithm": {"entropy": 0.01}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    ghost = BatchRef(TRAIN, (Key(0, 1, 7),), (Tags(),))

    def haunted(roles: RayRoles) -> None:
        """What a replica that dies between writing and reporting leaves; stays it, the step fails a check."""
        roles.handle.connect(60.0).put(ghost, {})
        kill_orders.order("rollout")

    with monkeypatch.context() as patch:
        before_steps(patch, {1: haunted, 2: lambda _: kill_orders.order("rollout")})
        with pytest.raises(ClusterError, match=r"rollout: 2 deaths .* more than runtime\.max_deaths = 1; "):
            train_loaded(tiny(tmp_path, **fragile(sections, deaths=1)), tmp_path / "cut")
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    assert [deaths for deaths, _ in take_counts(tmp_path / "cut")] == [0, 1, 0, 0]
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 1e-6)


STOPS: dict[str, tuple[dict[str, Any], Act, str]] = {
    "learner": ({}, rank(0), "rank 0 of 1 of the learner died"),
    "rank 1 of 2": ({"ranks": 2}, rank(1), "rank 1 of 2 of the learner died"),
    "index": ({}, store_actor("the store's index"), "the store's index died"),
    "storage unit": (
        {"store": "transferqueue"},
        at_the_update(store_actor("TransferQueue's storage unit 0")),
        "TransferQueue's storage unit 0 died; its rows are lost",
    ),
    "transferqueue controller": (
        {"store": "transferqueue"},
        store_actor("TransferQueue's controller"),
        "TransferQueue's controller died",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("who", STOPS)
def test_a_death_that_ends_the_run_is_named_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, who: str
):
    runtime, kill, named = STOPS[who]
    with monkeypatch.context() as patch:
        before_steps(patch, {2: kill})
        with pytest.raises(PracticumError) as raised:
            train_loaded(tiny(tmp_path, **fragile(MORTAL, **runtime)), tmp_path / "cut")
    assert named in str(raised.value)
    assert any("a checkpoint of step 1: --resume continues" in note for note in raised.value.__notes__)
    train_loaded(tiny(tmp_path, **MORTAL), tmp_path / "cut", resume=True)
    assert_same_run(whole, tmp_path / "cut", 1e-6)


def hang(actor: Any) -> None:
    os.kill(pid_of(actor), signal.SIGSTOP)


HANGS: dict[str, tuple[Act, str]] = {
    "replica in a rollout": (
        lambda roles: hang(roles.pools.rollout.replicas()[0]),
        "rollout 0 gave no sign of life",
    ),
    "replica at a sync": (
        at_the_update(lambda roles: hang(roles.pools.rollout.replicas()[0])),
        "waited 15 s for rollout 0: no answer",
    ),
    "reward worker": (
        lambda roles: hang(roles.pools.reward.replicas()[0]),
        "reward 0 (gave no sign of life|died: it accepts no connections)",
    ),
    "reward worker that scores": (
        lambda _: kill_orders.order("stop"),
        "reward 0 (gave no sign of life|died: it accepts no connections)",
    ),
}
"""A call waits for its deadline; but where Ray has to connect again, it gives up by itself."""


@pytest.mark.long
@pytest.mark.parametrize("who", HANGS)
def test_a_process_that_hangs_is_named_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str):
    act, named = HANGS[who]
    before_steps(monkeypatch, {2: act})
    with pytest.raises((DeadlineError, ClusterError), match=named):
        train_loaded(tiny(tmp_path, **hasty(MORTAL)), tmp_path / "run", quiet=True)
    assert steps_of(tmp_path / "run") == [0, 1], "it was well until somebody hung"


@pytest.mark.long
def test_a_reward_model_that_hangs_is_named_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_classifier(tmp_path / "judge")
    model = {"model": str(tmp_path / "judge"), "label": 1, "placement": "own", "deadline_s": 4}
    sections = hasty(MORTAL | {"reward": MORTAL["reward"] | {"models": {"judge": model}}})
    sections["rollout"] |= {"deadline_s": 30}
    before_steps(monkeypatch, {2: lambda roles: hang(roles.cluster.actors["reward.models.judge 0"])})
    with pytest.raises(PracticumError, match="reward model judge"):
        train_loaded(tiny(tmp_path, **sections), tmp_path / "run", quiet=True)
    assert steps_of(tmp_path / "run") == [0, 1]


def hasty(sections: dict[str, Any]) -> dict[str, Any]:
    """On Ray with short deadlines, where any death ends the run: one that is stopped is not dead."""
    found = fragile(sections, deaths=0)
    found["rollout"] |= {"deadline_s": 15}
    found["runtime"] |= {"stage_s": 15}
    return found


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


LOST = "the teachers are not compared with the student: teacher"
PROBED: dict[str, tuple[Act, str]] = {
    "teacher in an actor": (
        lambda roles: freeze_and_kill(roles.pools.teachers["other"].replicas()[0]),
        f"{LOST} other died",
    ),
    "rollout replica": (lambda roles: freeze_and_kill(roles.pools.rollout.replicas()[0]), "rollout 0 died"),
    "rank with a teacher": (lambda roles: freeze_and_kill(roles.group.workers[0]), f"{LOST} small died"),
}


@pytest.mark.long
@pytest.mark.parametrize("who", PROBED)
def test_a_death_during_the_probe_of_teachers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
):
    """A run goes on if a pool makes another of what died: without the table if that was a teacher. A rank's
    death ends it."""
    student, small, other = (save_teacher(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3))
    teachers = {"small": {"model": small}, "other": {"model": other, "placement": "own"}}
    route = {"by": "task", "map": {"copy": "small", "compare": "other"}}
    shared = {"model": {"path": student}, "teachers": teachers, "route": route, "distill": {}, "train": STEPS}
    sections = teachers_recipe(**fragile(shared | {"rollout": TINY["rollout"]}))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    act, named = PROBED[who]
    compare = RayRoles.compare_teachers

    def killing(self: RayRoles) -> tuple[list[str], list[str]]:
        act(self)
        return compare(self)

    monkeypatch.setattr(RayRoles, "compare_teachers", killing)
    monkeypatch.setattr("practicum.trainer.run.PROBED_STEPS", 1)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    if who == "rank with a teacher":
        with pytest.raises(PracticumError, match="rank 0 of 1 of the learner died"):
            train_loaded(recipe, tmp_path / "run")
    else:
        train_loaded(recipe, tmp_path / "run")
        assert steps_of(tmp_path / "run") == [0, 1, 2, 3]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert named in log
    compared = {line.split()[2] for line in log.splitlines()} >= {"small", "other"}
    assert compared == (who == "rollout replica"), "another replica compares them"
