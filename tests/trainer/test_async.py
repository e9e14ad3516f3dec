"""Runs with a lag: each step is sampled by the weights that the schedule says, whatever takes how long."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import PracticumError
from practicum.learning.learner import Learner
from practicum.observe import progress
from practicum.recipe.schema.recipe import Recipe
from practicum.trainer import window
from practicum.trainer.run import train_loaded
from tests.teachers.tiny_reward_models import save_classifier
from tests.teachers.tiny_teachers import MAKE, save_teacher

from .oracle import delay_everything, engines_in_threads, train_late
from .recipes import TINY, tiny
from .test_run import metrics_of, same_run, stop_after, weights_of

REWARD = {"reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}}
REFILLED = REWARD | {
    "reward": {"functions": [{"use": "tests.trainer.rewards:even_length"}]},
    "refills": 50,
    "train": TINY["train"] | {"minibatches": 2},
}
DECOUPLED = REWARD | {"algorithm": {"mismatch": "token"}, "train": TINY["train"] | {"epochs": 2}}
TOOLS = {
    "agent": {"loop": "tool_use", "tools": ["calculator"], "tool_call_format": "plain", "turns": 3},
    "tasks": {"total": {"kind": "total", "chat": True}},
    "model": {"random_init": TINY["model"]["random_init"] | {"context": 192}},
}
AGENT = REWARD | {"agent": {"loop": "tests.trainer.loops:uneven"}, "algorithm": {"loss": "dppo"}}


def equals_the_oracle(
    folder: Path, lag: int, seed: int, engines: str = "threads", **sections: Any
) -> list[dict[str, Any]]:
    """Train with random delays, and compare with the oracle bit for bit; gives the rows of metrics."""
    loaded = tiny(folder, "eval.rows=2", "eval.every=2", f"rollout.lag={lag}", **sections)
    with pytest.MonkeyPatch.context() as patch:
        delay_everything(patch, seed)
        if engines == "threads":
            engines_in_threads(patch)
        train_loaded(loaded, folder / "run", quiet=True)
    reports, weights = train_late(loaded.recipe, lag)
    rows = metrics_of(folder / "run")[1:]
    for report, row in zip(reports, rows, strict=True):
        assert {name: row.get(name if "/" in name else f"train/{name}") for name in report} == report
    found = weights_of(folder / "run")
    shared = found.keys() & weights.keys()  # an adapter is merged in the export
    assert shared or loaded.recipe.model.lora is not None
    assert all(torch.equal(found[name], weights[name]) for name in shared)
    return rows


@pytest.mark.parametrize(
    ("lag", "engines", "sections"),
    [(1, "process", AGENT), (2, "threads", REFILLED)],
    ids=["agent-dppo-1", "refilled-2"],
)
def test_a_lag_equals_a_synchronous_trainer_with_old_weights(
    tmp_path: Path, lag: int, engines: str, sections: dict
):
    rows = equals_the_oracle(tmp_path, lag, seed=0, engines=engines, **sections)
    stale = [min(t, lag) for t in range(len(rows))]
    assert [row["async/staleness"] for row in rows] == stale
    assert [row["async/staleness_max"] for row in rows] == stale
    assert [("train/sample_size" in row, "train/gap_mean" in row) for row in rows] == [
        (number > 0, number == 0) for number in stale
    ]


def test_one_engine_that_takes_the_weights_of_all_steps_in_turn_equals_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As vLLM's does; evaluations have their turns between the steps."""
    monkeypatch.setattr(Recipe, "sampling_engines", 1)
    rows = equals_the_oracle(tmp_path, 2, 5, "threads", **AGENT)
    assert [row["async/staleness"] for row in rows] == [0, 1, 2, 2]


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """What may be combined with a lag."""
    teacher = save_teacher(folder / "teacher", seed=1)
    taught: dict[str, Any] = {
        "model": {"random_init": MAKE},
        "distill": {"signal": "top_k", "top_k": 4},
    } | REWARD
    save_classifier(folder / "judge")
    judge = {"model": str(folder / "judge"), "label": 1}
    judged = {"reward": REWARD["reward"] | {"models": {"judge": judge}}}
    moe = {"family": "qwen3_moe", "experts": 4}
    return {
        "decoupled": DECOUPLED,
        "gspo": REWARD | {"algorithm": {"loss": "gspo", "advantage": "rloo"}},
        "kl": REWARD | {"algorithm": {"kl": {"place": "reward", "target": 0.1}}},
        "critic": REWARD | {"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 1}},
        "remax": REWARD | {"algorithm": {"advantage": "remax", "loss": "cispo"}},
        "padded": REWARD | {"train": TINY["train"] | {"minibatch_size": 5}},
        "tools": REWARD | TOOLS,
        "retried": REWARD | {"agent": {"loop": "tests.trainer.loops:fails_first", "on_failure": "retry"}},
        "colocated teacher": taught | {"teachers": {"t": {"model": teacher}}},
        "full signal": taught | {"teachers": {"t": {"model": teacher}}, "distill": {"signal": "full"}},
        "streamed teacher": taught | {"teachers": {"t": {"model": teacher, "placement": "own"}}},
        "copy of the student": taught | {"teachers": {"t": {"student": {"every": 2}}}},
        "reward model": judged,
        "experts": REWARD | {"model": {"random_init": TINY["model"]["random_init"] | moe}},
        "adapter": REWARD | {"model": TINY["model"] | {"lora": {"rank": 2}}},
    }


CASES = (
    *("decoupled", "gspo", "kl", "critic", "remax", "padded", "tools", "retried", "colocated teacher"),
    *("full signal", "streamed teacher", "copy of the student", "reward model", "experts", "adapter"),
)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_whatever_is_combined_with_a_lag_equals_the_oracle(tmp_path: Path, name: str):
    assert set(CASES) == cases(tmp_path).keys()
    equals_the_oracle(tmp_path, 2, seed=3, engines="process", **cases(tmp_path)[name])


@pytest.mark.long
@pytest.mark.parametrize("sections", [AGENT, REFILLED, REWARD], ids=["agent", "refilled", "plain"])
@given(lag=st.integers(1, 4), seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_many_delays(sections: dict[str, Any], lag: int, seed: int):
    with tempfile.TemporaryDirectory() as folder:
        equals_the_oracle(Path(folder), lag, seed, **sections)


@pytest.mark.long
@given(lag=st.integers(1, 4), seed=st.integers(0, 2**31))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_many_delays_of_a_process(lag: int, seed: int):
    with tempfile.TemporaryDirectory() as folder:
        equals_the_oracle(Path(folder), lag, seed, engines="process", **AGENT)


@pytest.mark.long
def test_lag_0_is_the_synchronous_trainer(tmp_path: Path):
    """Without a lag the oracle samples with the weights of now, and nothing runs in another thread."""
    rows = equals_the_oracle(tmp_path, 0, 1, "threads", **REWARD)
    assert not any(name.startswith("async/") or name == "time/waited" for row in rows for name in row)


@pytest.mark.parametrize("engines", ["threads", pytest.param("process", marks=pytest.mark.long)])
def test_a_stopped_run_continues_with_the_sessions_that_were_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: str
):
    if engines == "threads":
        engines_in_threads(monkeypatch)
    sections = REWARD | {"agent": {"loop": "tests.trainer.loops:notes_itself"}}
    options = ("rollout.lag=2", "eval.rows=2", "eval.every=2", "train.steps=5", "track.record=all")
    for name in ("whole", "cut"):
        monkeypatch.setenv("NOTES", str(tmp_path / f"{name}.txt"))
        with pytest.MonkeyPatch.context() as patch:
            if name == "cut":
                late_updates(patch)
                stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
            train_loaded(tiny(tmp_path, *options, **sections), tmp_path / name, quiet=True)
    path = tmp_path / "cut" / "checkpoints" / "step-000002" / "progress.json"
    done = {tuple(key[:2]) for key in json.loads(path.read_text())["window"]["done"]}
    assert len(done) > 2 * 16  # steps 3 and 4, and maybe some of step 5
    train_loaded(tiny(tmp_path, *options, **sections), tmp_path / "cut", resume=True, quiet=True)
    same_run(tmp_path / "whole", tmp_path / "cut")
    ran = Counter(tuple(map(int, line.split())) for line in (tmp_path / "cut.txt").read_text().splitlines())
    assert {name: ran[name] for name in done} == dict.fromkeys(done, 1)
    every = [(uid, session) for uid in range(5 * 4) for session in range(4)]
    assert ran.keys() == set(every)
    lines = map(json.loads, (tmp_path / "cut" / "samples.jsonl").read_text().splitlines())
    trained = [(row["step"], row["group"], row["session"]) for row in lines]
    assert trained == [(1 + uid // 4, uid, session) for uid, session in every]  # each once, in order


def late_updates(patch: pytest.MonkeyPatch) -> None:
    """The learner is slow: what may be sampled ahead is sampled when it is done."""
    update = Learner.update

    def late(self: Learner, batch: Any, **options: Any) -> Any:
        time.sleep(0.4)
        return update(self, batch, **options)

    patch.setattr(Learner, "update", late)


@pytest.mark.long
def test_an_error_ahead_costs_nothing_of_the_steps_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The reward raises in step 4, while the learner is at an earlier one; the run fails in step 4."""
    sections = {"reward": {"functions": [{"use": "tests.trainer.rewards:breaks_late"}]}}
    options = ("rollout.lag=2", "eval.rows=2", "train.steps=5")
    with pytest.raises(PracticumError) as raised:
        train_loaded(tiny(tmp_path, *options, **sections), tmp_path / "cut", quiet=True)
    assert "has a checkpoint of step 3: --resume continues from it" in raised.value.__notes__[-1]
    monkeypatch.setenv("REWARD_IS_MENDED", "1")
    train_loaded(tiny(tmp_path, *options, **sections), tmp_path / "cut", resume=True, quiet=True)
    train_loaded(tiny(tmp_path, *options, **sections), tmp_path / "whole", quiet=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_slow_and_long_answers_are_trained_on_as_often_as_they_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engines_in_threads(monkeypatch)
    generate, sampled = TorchEngine.generate, dict[tuple[int, int], int]()

    async def slower(self: TorchEngine, request: Any) -> Any:
        made = await generate(self, request)
        await asyncio.sleep(0.05 * len(made.tokens) * (request.counter.prompt % 3))
        if not request.sampling.greedy:  # evaluations are
            sampled[request.counter.prompt, request.counter.session] = len(made.tokens)
        return made

    monkeypatch.setattr(TorchEngine, "generate", slower)
    options = ("rollout.lag=2", "eval.rows=2", "track.record=all", "train.steps=5")
    train_loaded(tiny(tmp_path, *options, **REWARD), tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    trained = {(row["group"], row["session"]): row["sampled_tokens"] for row in rows}
    assert all(row["advantage"] is not None for row in rows)
    assert len(rows) == len(trained) == 5 * 4 * 4
    assert trained == sampled
    assert len(set(sampled.values())) > 2


def test_a_group_that_holds_the_learner_up_is_named_and_its_deadline_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(window, "TELL_S", 0.2)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    engines_in_threads(monkeypatch)
    generate = TorchEngine.generate

    async def hangs(self: TorchEngine, request: Any) -> Any:
        if request.counter.prompt == 5 and request.counter.session == 1:
            await asyncio.Event().wait()
        return await generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", hangs)
    options = ("rollout.lag=1", "eval.rows=2", "agent.deadline_s=2", "train.steps=2")
    train_loaded(tiny(tmp_path, *options, **REWARD), tmp_path / "run")
    assert metrics_of(tmp_path / "run")[2]["rollout/failed"] == 1
    late = re.compile(r"rollout of step 2 \(1 not done, the first of prompt 5 \(.*?\)\), \d+ s after it")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert any(late.match(told) for told in log.split("the learner waits: ")[1:])
    shown = " ".join(capsys.readouterr().out.split())  # lines may be folded
    assert any(late.match(told) for told in shown.split("step 1/2 · waiting: ")[1:])
