"""What is disturbed: recipes for both runtimes, and the kinds of processes that each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.teachers.tiny_reward_models import save_classifier
from tests.teachers.tiny_teachers import MAKE, TASKS, save_teacher

STEPS = 10


@dataclass(frozen=True)
class Victim:
    """A kind of process: how it is found, and which words of a sentence name it. `title` is looked for in
    command lines, `child` in the names of the run's child processes."""

    kind: str
    names: str
    title: str = ""
    child: str = ""
    survives: bool = False
    """Whether a run must go on after kill -9 of it."""


def _ray(kind: str, actor: str, names: str, survives: bool = False) -> Victim:
    return Victim(kind, names, title=rf"^ray::{actor}\b", survives=survives)


CONTROLLER = Victim("controller", "")
TOOL = Victim("tool", r"[Tt]ool", title=r"bwrap", survives=True)
SERVER = Victim("served teacher", r"teacher served", title=r"practicum serve .*--name served")
OWN_TEACHER = Victim("own teacher", r"teacher small", child="teacher small")
OWN_REWARD_MODEL = Victim("reward model", r"reward model judge|reward\.models\.judge", child="judge")
ENGINE = Victim("engine's process", r"the torch engine", child="torch engine")

RANK = _ray("learner rank", "TrainWorker", r"rank \d of \d of the learner")
REPLICA = _ray("engine replica", "RolloutWorker", r"rollout \d", survives=True)
REWARD_WORKER = _ray("reward worker", "RewardWorker", r"reward \d", survives=True)
TEACHER_WORKER = _ray("own teacher or client", "TeacherWorker", r"teacher (small|served)|teachers\.\w", True)
COPY_WORKER = _ray("own teacher", "TeacherWorker", r"teacher self|teachers\.self", survives=True)
REWARD_MODEL_WORKER = _ray("reward model", "RewardModelWorker", r"reward model judge", survives=True)
INDEX = _ray("store index", "StoreIndex", r"the store's index")
KEEPER = _ray("store keeper", "PackCopier", r"store|copied", survives=True)
QUEUE = _ray("TransferQueue controller", "TransferQueueController", r"TransferQueue's controller")
UNIT = _ray("TransferQueue unit", "SimpleStorageUnit", r"TransferQueue's storage unit \d")


@dataclass(frozen=True)
class Scenario:
    """A recipe and its victims."""

    name: str
    make: Callable[[Path, str], dict[str, Any]]
    """The recipe, given the folder of its models and the address of the served teacher."""
    victims: tuple[Victim, ...]

    def write(self, folder: Path, models: Path, server: str, slow: float) -> Path:
        """Write the recipe into a folder, with deadlines that are `slow` times as long."""
        path, recipe = folder / "recipe.yaml", _slower(self.make(models, server), slow)
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path


def _slower(recipe: Any, factor: float) -> Any:
    if isinstance(recipe, dict):
        late = dict.fromkeys(("deadline_s", "stage_s"), factor)
        return {k: v * late[k] if k in late else _slower(v, factor) for k, v in recipe.items()}
    return recipe


def make_recipe(rollout: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "name": "campaign",
        "seed": 3,
        "model": {"random_init": dict(MAKE)},
        "tasks": {name: dict(task) for name, task in TASKS.items()},
        "rollout": {"samples": 3, "max_new_tokens": 4, "max_num_seqs": 16, "deadline_s": 90}
        | (rollout or {}),
        "train": {"steps": STEPS, "prompts": 4, "lr": 1e-3},
        "reward": {"functions": [{"use": "tests.campaign.parts:by_letters"}]},
        "eval": {"rows": 2, "every": 4},
        "checkpoint": {"every": 1},
        "track": {"record": 2},
        "runtime": {"threads": 1},
    }
    return plain | sections


def make_teachers(models: Path, server: str, place: Any = "own") -> dict[str, Any]:
    """A teacher in its own process, a colocated one and one behind a URL, for two tasks."""
    small = {"model": str(models / "small"), "placement": place, "deadline_s": 20}
    wide = {"model": str(models / "wide")}
    served = {"url": server, "model": "served", "tokenizer": str(models / "small")}
    served |= {"deadline_s": 20}
    to = {"copy": {"small": 0.5, "wide": 0.5}, "compare": {"wide": 0.5, "served": 0.5}}
    return {
        "teachers": {"small": small, "wide": wide, "served": served},
        "route": {"by": "task", "map": to},
        "distill": {"top_k": 4},
    }


def _judge(models: Path) -> dict[str, Any]:
    model = {"model": str(models / "judge"), "label": 1, "placement": "own", "deadline_s": 20}
    return {"functions": [{"use": "tests.campaign.parts:by_letters"}], "models": {"judge": model}}


def _cluster(ranks: int, cpus: int, **store: Any) -> dict[str, Any]:
    runtime = {"kind": "ray", "threads": 1, "cpus": cpus, **store}
    runtime |= {"stage_s": 60, "max_deaths": 100}
    return {"runtime": runtime, "pools": {"train": {"devices": ranks}}}


def _agent() -> dict[str, Any]:
    return {
        "agent": {"loop": "tests.campaign.parts:agent", "tools": [{"use": "python", "timeout_s": 10}]},
        "refills": 4,
        "reward": {"functions": [{"use": "tests.campaign.parts:coarse"}]},
    }


def _local_teachers(models: Path, server: str) -> dict[str, Any]:
    learnt = {"algorithm": {"advantage": "gae"}, "critic": {}}
    return make_recipe({"lag": 1}, reward=_judge(models), **learnt, **make_teachers(models, server))


def _ray_teachers(models: Path, server: str) -> dict[str, Any]:
    sections = make_teachers(models, server) | _cluster(1, 12)
    sections["pools"]["rollout"] = {"devices": 2}
    return make_recipe(reward=_judge(models), **sections)


def _ray_agent(models: Path, server: str) -> dict[str, Any]:
    teachers = {"self": {"student": {"every": 2}, "placement": "own", "deadline_s": 20}}
    sections = _agent() | _cluster(1, 8)
    sections["pools"]["rollout"] = {"devices": 2}
    return make_recipe({"lag": 1}, teachers=teachers, distill={"top_k": 4}, **sections)


def _ray_queue(models: Path, server: str) -> dict[str, Any]:
    store = {"store": "transferqueue"}
    sections = {"algorithm": {"advantage": "gae"}, "critic": {}, **_cluster(2, 10, **store)}
    return make_recipe(teachers={"wide": {"model": str(models / "wide")}}, distill={"top_k": 4}, **sections)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "local: 3 teachers, reward model, critic, lag 1",
            _local_teachers,
            (CONTROLLER, OWN_TEACHER, SERVER, OWN_REWARD_MODEL, ENGINE),
        ),
        Scenario("local: agents, tool, refills", lambda *_: make_recipe(**_agent()), (CONTROLLER, TOOL)),
        Scenario("local: one turn, lag 2", lambda *_: make_recipe({"lag": 2}), (CONTROLLER, ENGINE)),
        Scenario(
            "ray: 3 teachers, reward model",
            _ray_teachers,
            (CONTROLLER, RANK, REPLICA, TEACHER_WORKER, SERVER, REWARD_MODEL_WORKER, INDEX, KEEPER),
        ),
        Scenario(
            "ray: agents, tool, refills, copy as teacher, lag 1",
            _ray_agent,
            (CONTROLLER, RANK, REPLICA, REWARD_WORKER, COPY_WORKER, INDEX, TOOL),
        ),
        Scenario(
            "ray: TransferQueue, 2 ranks, critic",
            _ray_queue,
            (CONTROLLER, RANK, REPLICA, REWARD_WORKER, QUEUE, UNIT),
        ),
    )
}


def save_models(folder: Path) -> None:
    """The models that recipes name."""
    save_teacher(folder / "small", seed=1)
    save_teacher(folder / "wide", seed=2, hidden=48)
    save_classifier(folder / "judge")
