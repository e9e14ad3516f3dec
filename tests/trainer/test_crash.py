"""A crash costs the step under way: what is kept, that it continues exactly, and what the command says."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.errors import PracticumError
from practicum.learning.learner import Learner
from practicum.roles.advantages import AdvantageRole
from practicum.roles.learner_rank import LearnerRank
from practicum.roles.student import StudentRole
from practicum.runtime.local import LocalRoles
from practicum.trainer import run as run_module
from practicum.trainer.checkpoints import Checkpoints
from practicum.trainer.run import train_loaded

from .recipes import tiny
from .test_run import KL, LORA, MINIBATCHES, PPO, SUPERVISED, metrics_of, same_run, stop_after

BROKEN: dict[str, Any] = {
    "reward": {"functions": [{"use": "tests.trainer.rewards:lazy_then_broken"}]},
    "eval": {"rows": 4},
}
"""Four prompts a step: the reward raises in step 4."""


def checkpoints(folder: Path) -> list[int]:
    return Checkpoints(folder / "checkpoints", 1).steps()


def raises(patch: pytest.MonkeyPatch, owner: type, name: str, *, at: int, after: bool = False) -> None:
    """Let the `at`-th call of a method raise, before or after its work."""
    whole, calls = getattr(owner, name), []

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        found = whole(self, *args, **kwargs) if after or len(calls) != at else None
        if len(calls) == at:
            raise RuntimeError("out of memory")
        return found

    patch.setattr(owner, name, calling)


@pytest.mark.parametrize(
    "sections",
    [{}, KL, pytest.param({"model": LORA["model"]}, marks=pytest.mark.long)],
    ids=["grpo", "kl", "adapter"],
)
def test_a_reward_that_raises_costs_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict):
    recipe = BROKEN | sections
    with pytest.raises(PracticumError) as raised:
        train_loaded(tiny(tmp_path, **recipe), tmp_path / "cut")
    assert "has a checkpoint of step 3: --resume continues from it" in raised.value.__notes__[-1]
    assert checkpoints(tmp_path / "cut") == [3]
    monkeypatch.setenv("REWARD_IS_MENDED", "1")
    train_loaded(tiny(tmp_path, **recipe), tmp_path / "cut", resume=True)
    train_loaded(tiny(tmp_path, **recipe), tmp_path / "whole")
    same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("sections", "owner", "name", "kept"),
    [
        ({"train": MINIBATCHES | {"steps": 3}}, Learner, "update", 2),  # before the first optimizer step
        # after the update: the step counts
        pytest.param(SUPERVISED, LocalRoles, "sync_weights", 3, marks=pytest.mark.long),
        pytest.param(
            {"eval": {"rows": 4, "every": 3}}, run_module.Trainer, "evaluate", 3, marks=pytest.mark.long
        ),
        (PPO, AdvantageRole, "_estimate", 2),
        (PPO, LearnerRank, "session_advantages", 2),
    ],
    ids=["update", "sync", "evaluation", "advantages", "advantages of samples"],
)
def test_a_crash_anywhere_in_a_step_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict, owner: type, name: str, kept: int
):
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    at = {"update": 9, "sync_weights": 3, "evaluate": 2, "_estimate": 3, "session_advantages": 3}[name]
    with monkeypatch.context() as patch:
        raises(patch, owner, name, at=at)
        with pytest.raises(RuntimeError) as raised:
            train_loaded(tiny(tmp_path, **sections), tmp_path / "cut")
    assert f"a checkpoint of step {kept}: " in raised.value.__notes__[-1]
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_half_an_update_is_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sections = {"train": MINIBATCHES | {"steps": 4}, "checkpoint": {"every": 2}}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        raises(patch, Learner, "update", at=14)  # the second of step 4's four
        with pytest.raises(RuntimeError) as raised:
            train_loaded(tiny(tmp_path, **sections), tmp_path / "cut")
    assert "no checkpoint of step 3 could be written: the student or the critic was already partly" in (
        note := raised.value.__notes__[-1]
    )
    assert "has a checkpoint of step 2: " in note
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_an_error_that_can_not_be_followed_by_a_checkpoint_is_still_the_one_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    raises(monkeypatch, StudentRole, "_facts", at=2)
    raises(monkeypatch, LocalRoles, "save", at=1)
    with pytest.raises(RuntimeError) as raised:
        train_loaded(tiny(tmp_path, train=MINIBATCHES), tmp_path / "run")
    assert "no checkpoint of step 1 could be written: out of memory" in raised.value.__notes__[-1]
    assert "has no checkpoint: start again with --fresh" in raised.value.__notes__[-1]


def test_checkpoints_by_the_clock_are_of_whole_steps_and_only_the_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("practicum.trainer.saver.EVERY_MINUTES", 1e-6)
    train_loaded(tiny(tmp_path), tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert [f"checkpoint step-{step:06d}" in log for step in range(5)] == [False, True, True, True, True]
    assert checkpoints(tmp_path / "run") == [3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_run_exits_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, times: int
):
    tiny(tmp_path, "train.steps=3")
    stop_after(monkeypatch, 2, lambda: [os.kill(os.getpid(), number) for _ in range(times)])
    command = ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, command).exit_code == 128 + number
    assert len(metrics_of(tmp_path / "run")) == (3 if times == 1 else 2)
