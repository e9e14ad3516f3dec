"""Runs that stop, continue or wait in a way that nobody asked for."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import CheckError, PracticumError, RecipeErrors
from practicum.learning import learner_checkpoint, optimizer
from practicum.recipe.load_recipe import load_recipe
from practicum.tasks.stream import PromptStream
from practicum.trainer import checkpoints
from practicum.trainer.checkpoints import Checkpoints, Progress
from practicum.trainer.run import train_loaded

from ..engines.test_confirm import made_by, same
from ..recipe.test_unread_keys import ignored_keys, write
from ..trainer.recipes import tiny
from .steps import passes, take_steps


def test_a_resumed_run_that_begins_with_the_first_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """hiyouga/EasyR1#57, verl-project/verl#5725: where the data had been read to was not kept or not used:
    prompts were trained on again, or passed over."""
    few = ("train.prompts=2", "rollout.samples=2", "eval.rows=0")
    train_loaded(tiny(tmp_path, *few, "train.steps=1"), tmp_path / "run", quiet=True)
    shutil.copytree(tmp_path / "run", tmp_path / "forgets")
    loaded = tiny(tmp_path, *few, "train.steps=2")
    assert train_loaded(loaded, tmp_path / "run", resume=True, quiet=True).steps == 2
    monkeypatch.setattr(PromptStream, "load_state_dict", lambda stream, state: None)
    with pytest.raises(CheckError, match=r"step-000001 was not resumed completely: the next prompt"):
        train_loaded(loaded, tmp_path / "forgets", resume=True, quiet=True)


def test_a_resumed_run_without_the_optimizers_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """KempnerInstitute/KempnerForge#114, thinking-machines-lab/tinker-feedback#127: weights were restored,
    the optimizer's moments were not, and nothing said so."""
    few = ("train.prompts=2", "eval.rows=0")
    reward = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}
    train_loaded(tiny(tmp_path, *few, "train.steps=1", reward=reward), tmp_path / "run", quiet=True)
    shutil.copytree(tmp_path / "run", tmp_path / "cold")
    loaded = tiny(tmp_path, *few, "train.steps=2", reward=reward)
    assert train_loaded(loaded, tmp_path / "run", resume=True, quiet=True).steps == 2
    monkeypatch.setattr(
        learner_checkpoint, "_empty_states", lambda states, index: {key: {} for key in states}
    )
    with pytest.raises(CheckError, match=r"was not loaded completely: .* sum to 0, expected "):
        train_loaded(loaded, tmp_path / "cold", resume=True, quiet=True)


def test_a_checkpoint_that_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """RLinf/RLinf#1469, PrimeIntellect-ai/prime-rl#1825: a run that was killed while it wrote a checkpoint
    was resumed from that one, the newest."""

    def whole(folder: Path) -> None:
        (folder / "student").mkdir()

    def killed(folder: Path) -> None:
        whole(folder)
        raise KeyboardInterrupt

    kept = Checkpoints(tmp_path, keep_last=2)
    kept.save(Progress(step=1), whole)
    assert kept.latest()[1].step == 1
    monkeypatch.setattr(checkpoints, "ASIDE", "")  # written where it stays, not aside
    with pytest.raises(KeyboardInterrupt):
        kept.save(Progress(step=2), killed)
    assert (tmp_path / "step-000002").is_dir()
    assert kept.latest()[1].step == 1
    shutil.rmtree(tmp_path / "step-000001")
    with pytest.raises(PracticumError, match=r"has no checkpoint"):
        kept.latest()


def test_an_engine_that_never_answers(monkeypatch: pytest.MonkeyPatch):
    """NVIDIA-NeMo/RL#3488, verl-project/verl#7155: with its rollout workers dead or stuck, the trainer waited
    for hours."""
    assert passes("late")

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(TorchEngine, "generate", silent)
    with pytest.raises(PracticumError, match=r"8 sessions failed, the first: .* was not done after"):
        take_steps("late", 1)


def test_answers_that_depend_on_their_neighbours():
    """vllm-project/vllm#51187, thinking-machines-lab/batch_invariant_ops#6: the same requests with the same
    seed had other logprobs, and in the end other tokens, by what else was in the engine's batch."""
    (alone,), _ = made_by("qwen3", [2], 0.05, slots=1)
    drafted, _ = made_by("qwen3", range(5), 0.05, slots=5, alone=False)
    confirmed, _ = made_by("qwen3", range(5), 0.05, slots=5)
    assert not all(map(same, alone, drafted[2]))
    assert all(map(same, alone, confirmed[2]))


def test_a_key_that_nothing_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#5354, microsoft/agent-lightning#464: options were in the config and the docs, and no
    code read them."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeErrors, match=r"train.clip_nrom: found an unknown key"):
        tiny(tmp_path, "train.clip_nrom=1.0")

    def ignores(parameters: Any, train: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=train.lr, betas=train.betas)

    loaded = load_recipe(write(tmp_path, {"out": "mine"}))
    assert not ignored_keys(loaded, monkeypatch)
    monkeypatch.setitem(optimizer.OPTIMIZERS, "adamw", ignores)
    loaded = load_recipe(write(tmp_path, {"out": "theirs"}))
    assert ignored_keys(loaded, monkeypatch) == {"train.weight_decay"}
