"""Advantages that are not what the sessions of a group earned against one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum.algorithms import advantages
from practicum.algorithms.segments import segment_count, segment_mean, segment_sum
from practicum.dataplane.ragged import Columns
from practicum.errors import CheckError, PracticumError, RecipeErrors
from practicum.rewards.reward_functions import RewardSample
from practicum.roles.advantages import AdvantageRole
from practicum.roles.reward import at_last_sampled
from practicum.roles.run_stage import StepInfo

from ..trainer import rewards
from ..trainer.recipes import tiny
from .steps import passes, take_steps

_ESTIMATE = AdvantageRole._estimate


def earned_by_rows(columns: Columns, step: StepInfo, moved: int = 0) -> Columns:
    """The columns with the whole session's reward on each row, or that of a row further on."""
    mask = columns.ragged("response_mask")
    rewards_B = torch.tensor([tags.reward or 0.0 for tags in step.batch.tags]).roll(moved)
    earned = at_last_sampled(rewards_B, mask)
    return Columns("advantages", {"response_mask": mask, "reward_tokens": earned})


def test_a_session_that_counts_once_for_each_trajectory(monkeypatch: pytest.MonkeyPatch):
    """radixark/miles#2378, microsoft/agent-lightning#462: a group's mean and deviation were of rows, so
    sessions that left many rows were most of it."""
    assert passes("agent")

    def by_rows(
        role: AdvantageRole, columns: Columns, mask_N: Tensor, _: Tensor, __: list[int], step: StepInfo
    ) -> Any:
        prompts, mask = [key.prompt for key in step.batch.keys], columns.ragged("response_mask")
        row_N = torch.arange(len(mask)).repeat_interleave(torch.tensor(mask.lengths))
        return _ESTIMATE(role, earned_by_rows(columns, step), mask_N, row_N, prompts, step)

    monkeypatch.setattr(AdvantageRole, "_estimate", by_rows)
    with pytest.raises(CheckError, match=r"check advantages: the advantages of prompt 0's 4 sessions add up"):
        take_steps("agent")


def test_sessions_of_one_prompt_in_groups_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """rllm-org/rllm#605: sessions were grouped by an id of each, so all groups were of one."""
    assert passes("plain")

    def apart(role: Any, columns: Any, mask_N: Any, session_N: Any, prompts: list[int], step: Any) -> Any:
        return _ESTIMATE(role, columns, mask_N, session_N, list(range(len(prompts))), step)

    monkeypatch.setattr(AdvantageRole, "_estimate", apart)
    with pytest.raises(CheckError, match=r"check advantages: .* its advantage is 0: the estimator compared"):
        take_steps("plain")


def test_prompts_with_equal_texts_in_one_group(monkeypatch: pytest.MonkeyPatch):
    """NVIDIA-NeMo/Gym#4013: sessions were grouped by the text of their prompt, so prompts with equal texts
    were one group."""
    assert passes("plain")

    def by_text(role: Any, columns: Any, mask_N: Any, session_N: Any, prompts: list[int], step: Any) -> Any:
        return _ESTIMATE(role, columns, mask_N, session_N, [0] * len(prompts), step)

    monkeypatch.setattr(AdvantageRole, "_estimate", by_text)
    with pytest.raises(CheckError, match=r"check advantages: "):
        take_steps("plain")


def test_rewards_of_other_rows(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#2185: rows were put into another order for the learner, and rewards were not."""
    assert passes("plain")

    def moved(role: Any, columns: Any, mask_N: Any, session_N: Any, prompts: list[int], step: Any) -> Any:
        return _ESTIMATE(role, earned_by_rows(columns, step, moved=1), mask_N, session_N, prompts, step)

    monkeypatch.setattr(AdvantageRole, "_estimate", moved)
    with pytest.raises(CheckError, match=r"check advantages: .* the estimator compared other sessions"):
        take_steps("plain")


def test_a_deviation_of_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """axolotl-ai-cloud/axolotl#3353, huggingface/trl#5773: the deviation of a group of one is not a number,
    and so was its advantage."""
    assert passes("thinned")

    def unbiased(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
        centred_N = values_N - segment_mean(values_N, segment_N, segments)[segment_N]
        freedom = segment_count(segment_N, segments) - 1
        return (segment_sum(centred_N.square(), segment_N, segments) / freedom).sqrt()

    monkeypatch.setattr(advantages, "segment_std", unbiased)
    with pytest.raises(CheckError, match=r"check advantages: .* and its advantage is nan"):
        take_steps("thinned")
    with pytest.raises(RecipeErrors, match=r"rollout.samples: found 1 with algorithm.advantage grpo"):
        tiny(tmp_path, "rollout.samples=1")


def test_a_reward_that_is_no_number(monkeypatch: pytest.MonkeyPatch):
    """huggingface/trl#5773: the NaN of one sample was in the mean of its group."""
    assert passes("plain")

    def of_some(sample: RewardSample) -> float:
        return float("nan") if "session 1/" in sample.key else 0.0

    monkeypatch.setattr(rewards, "by_letters", of_some)
    with pytest.raises(PracticumError, match=r"by_letters .*returned nan, expected a finite number"):
        take_steps("plain")
