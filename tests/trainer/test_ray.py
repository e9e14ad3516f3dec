"""The same recipe on Ray: the same rewards, losses and weights as in this process."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from practicum.dataplane.ray_store.ray_store import RayStore
from practicum.models.load_model import load_model
from practicum.observe.records.compare_runs import compare_runs
from practicum.observe.records.read_record import Record
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.schema.recipe import Model
from practicum.trainer.run import train_loaded
from tests.cluster import local_ray
from tests.serving.servers import MODEL, served
from tests.teachers.tiny_reward_models import save_classifier
from tests.teachers.tiny_teachers import save_adapter, save_teacher, teachers_recipe

from .recipes import TINY, tiny
from .test_run import metrics_of, stop_after, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMED = re.compile(
    r"time/.*|.*/tokens_per_second|teacher/.*/(seconds|wakes)|teachers/overlap_fraction|shared/.*|balance/.*|padding/.*"
)
"""Metrics that the clock, the number of ranks or where a teacher lives makes."""
STEPS = {"steps": 3, "prompts": 4, "lr": 1e-3, "optimizer": "tests.learning.optimizers:steady"}
"""AdamW divides by the gradient's size: where that is nothing, eps decides how far rounding is blown up."""
REWARD = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}
GRPO = {"reward": REWARD, "train": STEPS | {"epochs": 2}, "algorithm": {"kl": {"place": "loss"}}}
PPO = {
    "reward": REWARD,
    "algorithm": {"advantage": "gae"},
    "critic": {},
    "train": STEPS | {"minibatches": 2},
    "rollout": TINY["rollout"] | {"samples": 3},
    "agent": {"loop": "tests.trainer.loops:uneven"},
}


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with local_ray(cpus=12):
        yield


def on_ray(sections: dict[str, Any], *, ranks: int = 1, store: str = "ray") -> dict[str, Any]:
    """The same sections with nothing changed but the runtime."""
    runtime = {"kind": "ray", "threads": 1, "store": store}
    return sections | {"runtime": runtime, "pools": {"train": {"devices": ranks}}}


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without what differs by nature."""
    return [{k: v for k, v in row.items() if not TIMED.fullmatch(k)} for row in metrics_of(folder)]


def assert_same_run(one: Path, other: Path, tolerance: float) -> None:
    """Weights agree within the tolerance, metrics within 1e-6: an engine rounds by what shares its batch. The
    comparison says something: the weights moved in every step."""
    for a, b in zip(timeless(one), timeless(other), strict=True):
        assert a == pytest.approx(b, abs=1e-6, rel=1e-6)
        assert a["step"] == 0 or a["train/grad_norm"] > 0
    here, there = weights_of(one), weights_of(other)
    assert here.keys() == there.keys()
    for name, weight in here.items():
        torch.testing.assert_close(weight, there[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("ranks", "store"),
    [
        (1, "ray"),
        pytest.param(2, "transferqueue", marks=pytest.mark.long),
        pytest.param(2, "ray", marks=pytest.mark.long),
        pytest.param(1, "transferqueue", marks=pytest.mark.long),
    ],
)
def test_a_run_on_ray_is_the_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, store: str
):
    sections = GRPO if ranks == 1 else PPO
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    # Workers import the store anew; in this process nobody may read or write a column.
    for method in ("get", "put", "save", "load"):
        monkeypatch.setattr(RayStore, method, _forbidden)
    train_loaded(tiny(tmp_path, **on_ray(sections, ranks=ranks, store=store)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 0.0 if ranks == 1 else 1e-6)
    for name in ("samples.jsonl", "eval.jsonl"):
        here, there = (lines_of(tmp_path / run / name) for run in ("local", "ray"))
        assert [row.pop("advantage") for row in here] == pytest.approx(
            [row.pop("advantage") for row in there], abs=1e-6
        )
        assert here == there
    if ranks == 1:
        assert compare_runs(tmp_path / "local", tmp_path / "ray").first is None
    check_record(tmp_path / "local", tmp_path / "ray", ranks)


@pytest.mark.long
def test_an_agent_behind_the_endpoint_on_ray_is_the_local_one(tmp_path: Path):
    sections = GRPO | {"agent": {"loop": {"function": "tests.trainer.test_agents:asks"}}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    train_loaded(tiny(tmp_path, **on_ray(sections)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 0.0)


@pytest.mark.long
def test_an_adapter_on_ray_is_the_local_one(tmp_path: Path):
    """Ranks read their shards of the base out of its file."""
    start = save_teacher(tmp_path / "start", seed=0, scale=1.0)
    sections = PPO | {"model": {"path": start, "lora": {"rank": 4}}}
    sections |= {"algorithm": {"advantage": "gae", "kl": {"place": "reward"}}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    train_loaded(tiny(tmp_path, **on_ray(sections, ranks=2)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapter"])
def test_a_hybrid_on_ray_is_the_local_one(tmp_path: Path, lora: dict[str, Any]):
    """Two ranks share layers that carry a state, or an adapter on them, and a teacher with such layers."""
    start = save_teacher(tmp_path / "start", seed=0, scale=1.0, family="qwen3_5")
    sections = GRPO | {"model": {"path": start} | lora, "teachers": {"t": {"model": start}}, "distill": {}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    train_loaded(tiny(tmp_path, **on_ray(sections, ranks=2)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 1e-5)
    begun, ended = load_file(Path(start) / "model.safetensors"), weights_of(tmp_path / "ray")
    moved = {name for name, weight in ended.items() if not torch.equal(weight, begun[name])}
    assert any("linear_attn.in_proj" in name for name in moved)


@pytest.mark.long
def test_adapter_teachers_on_ray_are_the_local_ones(tmp_path: Path):
    """One on the ranks, one with its own process; the ranks cut the student's base into shards."""
    base = save_teacher(tmp_path / "base", seed=0)
    for seed, name in enumerate(("copy", "compare")):
        save_adapter(tmp_path / name, base, seed=seed)
    teachers = {"copy": {"adapter": str(tmp_path / "copy")}}
    teachers["compare"] = {"adapter": str(tmp_path / "compare"), "placement": "own"}
    sections = teachers_recipe(
        model={"path": base, "lora": {"rank": 4}},
        train=STEPS,
        route={"by": "task"},
        teachers=teachers,
        distill={"signal": "full"},
    )
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    train_loaded(tiny(tmp_path, **on_ray(sections, ranks=2)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 1e-6)


def check_record(local: Path, ray: Path, ranks: int) -> None:
    """Both record the same rows, column by column; on Ray each worker writes its own part."""
    here, there = Record(local), Record(ray)
    assert not here.problems + there.problems
    assert [row.key for row in here.rows()] == [row.key for row in there.rows()]
    for row in here.rows():
        mine, theirs = here.row(row.step, row.key), there.row(row.step, row.key)
        assert mine is not None
        assert theirs is not None
        assert mine.columns.keys() == theirs.columns.keys() >= {"advantages", "ratio", "share"}
        assert list(mine.columns["response_ids"]) == list(theirs.columns["response_ids"])
        assert mine.columns["share"] == pytest.approx(theirs.columns["share"], abs=1e-5, nan_ok=True)
    writers = {(span.role, span.number) for span in there.stages(1)}
    learners = {("train", rank) for rank in range(ranks)}
    assert writers >= {("controller", 0), ("rollout", 0), ("reward", 0)} | learners


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _forbidden(*_: object, **__: object) -> None:
    raise AssertionError("the controller touched a column")


def taught(folder: Path, teachers: dict[str, Any], **sections: Any) -> LoadedRecipe:
    """A student of three teachers, one of them its own copy, which it renews every other step."""
    path = folder / "recipe.yaml"
    route = {"by": "task", "map": {"copy": {"small": 0.5, "self": 0.5}, "compare": "wide"}}
    recipe = teachers_recipe(teachers=teachers, route=route, distill={"signal": "full"}, **sections)
    path.write_text(yaml.safe_dump(recipe | {"train": STEPS | {"steps": 4, "prompts": 6}}))
    return load_recipe(path)


@pytest.mark.long
def test_teachers_streamed_on_ray_teach_as_colocated_ones_here_also_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = save_teacher(tmp_path / "small", seed=1)
    wide = save_teacher(tmp_path / "wide", seed=2, hidden=48)
    teachers = {"small": {"model": small}, "wide": {"model": wide}, "self": {"student": {"every": 2}}}
    train_loaded(taught(tmp_path, teachers), tmp_path / "local")
    teachers["small"]["placement"] = {"own": {"replicas": 2}}
    teachers["self"]["placement"] = "own"
    recipe = taught(tmp_path, teachers, **on_ray({}))
    with monkeypatch.context() as patch:  # the copy of step 3 teaches step 4 too
        stop_after(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train_loaded(recipe, tmp_path / "ray").interrupted
    train_loaded(recipe, tmp_path / "ray", resume=True)
    assert_same_run(tmp_path / "local", tmp_path / "ray", 1e-6)
    assert all(0 <= row["teachers/overlap_fraction"] <= 1 for row in metrics_of(tmp_path / "ray")[1:])


def test_the_first_step_on_ray_probes_teachers_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Colocated with the ranks, in an actor and behind a URL: the local table, and no other number."""
    student, *others = (save_teacher(tmp_path / str(seed), seed=seed, scale=9.0) for seed in (1, 2, 3))
    route = {"by": "task", "map": {"copy": {"small": 0.5, "far": 0.5}, "compare": "other"}}
    teachers: dict[str, Any] = {"small": {"model": others[0]}, "other": {"model": others[1]}}
    shared = {"model": {"path": student}, "train": STEPS, "route": route, "distill": {}}

    def run(name: str, **sections: Any) -> tuple[Path, list[list[str]]]:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(teachers_recipe(teachers=teachers, **shared | sections)))
        train_loaded(load_recipe(path), tmp_path / name)
        said = (line.split() for line in (tmp_path / name / "log.txt").read_text().splitlines())
        return tmp_path / name, [line[2:] for line in said if line[2] in ("small", "other", "far")]

    with served(load_model(Model(path=others[0], device="cpu"), 0)) as server:
        teachers["far"] = {"url": server.url, "model": MODEL, "tokenizer": student}
        plain, nothing = run("plain", **on_ray({}))
        monkeypatch.setattr("practicum.trainer.run.PROBED_STEPS", 1)
        _, here = run("local")
        teachers["other"]["placement"] = "own"
        probed, there = run("probed", **on_ray({}))
    assert not nothing
    assert [row[0] for row in here] == ["far", "other", "small"]
    assert here == there
    assert_same_run(plain, probed, 0.0)
    wakes = [[row["teacher/small/wakes"] for row in metrics_of(run)[1:]] for run in (plain, probed)]
    assert wakes[0] == wakes[1]


OF_THE_USER = """
def centred(samples):
    sizes = [sum(map(ord, sample.response_text)) % 7 for sample in samples]
    return [size - sum(sizes) / len(sizes) for size in sizes]

def twice(word: str) -> str:
    \"\"\"Says a word twice.

    Args:
        word: what to say
    \"\"\"
    return word + word

async def loop(session):
    turn = await session.generate(max_new_tokens=2)
    if turn.tokens[0] % 7 == 0:
        raise ValueError("not this token")
    said = await session.tool("twice", {"word": open("word.txt").read()})
    session.new_trajectory()
    await session.generate(session.tokenizer.encode(said.text, add_special_tokens=False), max_new_tokens=3)
    return (session.trajectories, float(sum(turn.tokens) % 5)) if session.index % 2 else None
"""


@pytest.mark.long
def test_what_lies_in_the_folder_of_a_run_is_found_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Models, files and modules by relative names; a function of batches beside a model that streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_the_user.py").write_text(OF_THE_USER)
    (tmp_path / "word.txt").write_text("so")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a=", "answer": "a"}\n{"prompt": "b=", "answer": "b"}\n')
    save_teacher(tmp_path / "student", seed=3)
    save_classifier(tmp_path / "judge")
    judge: dict[str, Any] = {"model": "judge", "kind": "classifier"}
    function = {"use": "of_the_user:centred", "batch": True}
    sections: dict[str, Any] = {
        "model": {"path": "student"},
        "tasks": {"file": {"file": "rows.jsonl"}, "compare": {"kind": "compare"}},
        "reward": {"functions": [function], "models": {"judge": judge}},
        "algorithm": {"advantage": "remax", "kl": {"place": "reward", "target": 0.1}},
        "agent": {"loop": "of_the_user:loop", "tools": [{"use": "of_the_user:twice"}], "on_failure": "retry"},
        "train": STEPS | {"steps": 2},
    }
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    judge["placement"] = "own"
    runtime = on_ray(sections)
    train_loaded(tiny(tmp_path, **runtime), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 1e-6)


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_is_resumed_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ranks read their shards of student, critic and reference out of one file."""
    sections = PPO | {"model": {"path": save_teacher(tmp_path / "start", seed=0, scale=1.0)}}
    sections |= {"algorithm": {"advantage": "gae", "kl": {"place": "reward"}}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        outcome = train_loaded(tiny(tmp_path, **on_ray(sections, ranks=2)), tmp_path / "cut")
    assert outcome.interrupted
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 1e-6)
