"""Rollouts ahead of the learner: groups that are left out, weights of another age, prompts that are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from practicum.errors import CheckError, RecipeErrors
from practicum.runtime.local import LocalRoles
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import SampledStep, StepSampler
from practicum.trainer.window import Window

from ..trainer.recipes import tiny
from .steps import passes, take_steps


@pytest.mark.long
def test_groups_that_are_left_out_for_being_late(monkeypatch: pytest.MonkeyPatch):
    """thinking-machines-lab/tinker-cookbook#822: groups that took longer than the allowed staleness were
    thrown away: what was trained on were the quick and easy prompts."""
    assert passes("ahead")
    sample = StepSampler.sample

    def punctual(sampler: StepSampler, step: SampledStep) -> None:
        sample(sampler, step)
        late = step.prompts[-1].uid
        step.batch = step.batch.where(lambda key, _: key.prompt != late)

    monkeypatch.setattr(StepSampler, "sample", punctual)
    with pytest.raises(CheckError, match=r"check groups: prompt 1 was drawn .* does not train on it"):
        take_steps("ahead", 3)


def test_rows_that_are_older_than_is_counted(monkeypatch: pytest.MonkeyPatch):
    """PrimeIntellect-ai/prime-rl#2674, verl-project/verl#7569: staleness was counted from something else than
    the weights that sampled a row's oldest token, and rows were older than it said."""
    assert passes("ahead")
    give = LocalRoles._give
    monkeypatch.setattr(
        LocalRoles, "_give", lambda roles, engine, step: give(roles, engine, max(0, step - 1))
    )
    with pytest.raises(CheckError, match=r"check weight_version: .* was sampled with weight versions 0–0"):
        take_steps("ahead", 3)


def test_a_ratio_to_a_policy_that_never_sampled(tmp_path: Path):
    """radixark/miles#1829: with rollouts ahead of the learner, old logprobs were recomputed by the weights of
    now, and the clipped ratio was to a policy that had sampled nothing."""
    assert tiny(tmp_path, "rollout.lag=1", "algorithm.old_logprobs=rollout")
    weighed = ("algorithm.old_logprobs=recompute", "algorithm.mismatch=token")
    assert tiny(tmp_path, "rollout.lag=1", *weighed)
    with pytest.raises(RecipeErrors, match=r"algorithm.old_logprobs: found recompute"):
        tiny(tmp_path, "rollout.lag=1", "algorithm.old_logprobs=recompute")


def test_prompts_that_were_drawn_ahead_and_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """OpenRLHF/OpenRLHF#1322, NVIDIA-NeMo/RL#3599: a checkpoint kept how far the data had been read, which
    was ahead of what had been trained on: a resumed run passed over the prompts between them."""
    few = ("train.prompts=2", "rollout.samples=2", "eval.rows=0", "train.steps=3", "rollout.lag=1")
    assert train_loaded(tiny(tmp_path, *few), tmp_path / "whole", quiet=True).steps == 3
    monkeypatch.setattr(Window, "stream_state", lambda window, number: window.sampler.stream.state_dict())
    with pytest.raises(CheckError, match=r"step 1 would continue with prompt [46], .* after .* is 2"):
        train_loaded(tiny(tmp_path, *few), tmp_path / "forgets", quiet=True)
