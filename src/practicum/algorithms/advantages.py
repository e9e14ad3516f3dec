"""Advantage estimators: pure functions of `AdvantageInputs`, found by their names in the table of traits.

Estimators that compare the sessions of a group leave out sessions without sampled tokens. A group left with
one session, or one whose scores are all equal ("flat"), has no relative signal: its centred scores are
exactly 0, free of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from practicum.algorithms.segments import (
    discounted_sum_ahead,
    next_in_segment,
    sampled_in_session_order,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_std,
    segment_sum,
)
from practicum.recipe.algorithm_traits import ESTIMATORS

EPS = 1e-6
"""Added to every standard deviation that divides."""


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch of sessions, packed.

    `token_rewards_N` holds all rewards: the outcome at a session's last sampled token, per-token
    rewards, KL penalties. A session's score is their sum over its sampled tokens. `group_S` numbers
    the prompts, `baseline_S` is the greedy reward of each session's prompt (remax), `values_N` the
    critic's (gae). `parts_S` holds what each reward function and model said of the sessions, before
    its weight. It is NaN where a session's task does not have it.
    """

    token_rewards_N: Tensor
    mask_N: Tensor
    session_N: Tensor
    group_S: Tensor
    baseline_S: Tensor | None = None
    values_N: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    parts_S: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages (0 at masked positions), the critic's targets if there are any, and counts."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupScores:
    """Each session's score minus its group's mean, and its group's std, size and signal (bool).

    Statistics: `groups` that have sessions, `groups_of_one`, `flat_groups` (of two sessions or more).
    """

    centred_S: Tensor
    std_S: Tensor
    size_S: Tensor
    signal_S: Tensor
    stats: dict[str, float]


def session_scores(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return the score of each session, and whether it has sampled tokens (bool)."""
    sessions, mask_N = len(inputs.group_S), inputs.mask_N
    session_M = inputs.session_N[mask_N]
    score_S = segment_sum(inputs.token_rewards_N[mask_N], session_M, sessions)
    return score_S, segment_count(session_M, sessions) > 0


def group_scores(inputs: AdvantageInputs) -> GroupScores:
    """Compare each session's score with those of its group."""
    score_S, live_S = session_scores(inputs)
    group_S = inputs.group_S
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    live = (score_S[live_S], group_S[live_S], groups)
    size_G = segment_count(group_S[live_S], groups)
    equal_G = segment_min(*live) == segment_max(*live)
    signal_S = live_S & ~equal_G[group_S]
    return GroupScores(
        centred_S=(score_S - segment_mean(*live)[group_S]).masked_fill(~signal_S, 0.0),
        std_S=segment_std(*live)[group_S],
        size_S=size_G[group_S],
        signal_S=signal_S,
        stats={
            "groups": float((size_G > 0).sum()),
            "groups_of_one": float((size_G == 1).sum()),
            "flat_groups": float(((size_G > 1) & equal_G).sum()),
        },
    )


def to_tokens(values_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Return the value of its session for each sampled token, and 0 at masked positions."""
    return values_S[inputs.session_N].masked_fill(~inputs.mask_N, 0.0)


def discounted_returns(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over a session's sampled tokens, 0 at masked positions."""
    order_M = sampled_in_session_order(inputs.mask_N, inputs.session_N)
    rewards_M, session_M = inputs.token_rewards_N[order_M], inputs.session_N[order_M]
    returns_N = torch.zeros_like(inputs.token_rewards_N)
    returns_N[order_M] = discounted_sum_ahead(rewards_M, session_M, gamma)
    return returns_N


def whiten(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6) over the sampled tokens, std unbiased, 0 at masked positions.

    Where nothing varies (a single sampled token, or all of them equal) the result is exactly 0.
    """
    white_N = torch.zeros_like(values_N)
    sampled_M = values_N[mask_N]
    if len(sampled_M) > 1 and sampled_M.min() != sampled_M.max():
        white_N[mask_N] = (sampled_M - sampled_M.mean()) / (sampled_M.std() + EPS)
    return white_N


def gae(inputs: AdvantageInputs) -> AdvantageResult:
    """Exponential mean of the critic's temporal differences, whitened if `whiten`, and the plain returns.

        delta_t = r_t + gamma V_{t+1} - V_t     V after the session's last sampled token is 0
        A_t = delta_t + gamma lam A_{t+1},  return_t = A_t + V_t

    Schulman et al. 2015, "High-dimensional continuous control using generalized advantage estimation",
    arXiv:1506.02438. Steps are a session's sampled tokens: what a tool or template put between two of
    them is skipped over, not a step.
    """
    assert inputs.values_N is not None, "gae needs values_N, the critic's values"
    order_M = sampled_in_session_order(inputs.mask_N, inputs.session_N)
    session_M, values_M = inputs.session_N[order_M], inputs.values_N[order_M]
    delta_M = inputs.token_rewards_N[order_M] - values_M
    delta_M = delta_M + inputs.gamma * next_in_segment(values_M, session_M)
    advantages_M = discounted_sum_ahead(delta_M, session_M, inputs.gamma * inputs.lam)
    advantages_N, returns_N = torch.zeros_like(inputs.values_N), torch.zeros_like(inputs.values_N)
    advantages_N[order_M] = advantages_M
    returns_N[order_M] = advantages_M + values_M
    if inputs.whiten:
        advantages_N = whiten(advantages_N, inputs.mask_N)
    return AdvantageResult(advantages_N, returns_N)


def grpo(inputs: AdvantageInputs) -> AdvantageResult:
    """A_t = (score - mean_group) / (std_group + 1e-6), std unbiased, or 0 for a group of one or a flat group.

    Shao et al. 2024, "DeepSeekMath: Pushing the limits of mathematical reasoning in open language
    models", arXiv:2402.03300.
    """
    scores = group_scores(inputs)
    advantages_S = scores.centred_S / (scores.std_S + EPS)
    return AdvantageResult(to_tokens(advantages_S, inputs), stats=scores.stats)


def dr_grpo(inputs: AdvantageInputs) -> AdvantageResult:
    """A_t = score - mean_group, or 0 for a group of one or a flat group.

    Liu et al. 2025, "Understanding R1-Zero-like training: A critical perspective", arXiv:2503.20783.
    """
    scores = group_scores(inputs)
    return AdvantageResult(to_tokens(scores.centred_S, inputs), stats=scores.stats)


def rloo(inputs: AdvantageInputs) -> AdvantageResult:
    """REINFORCE with the mean of the other answers as baseline, or 0 for a group of one or a flat group.

        A_t = score - sum_{others} score / (n - 1)     n: sessions of the group
            = n / (n - 1) * (score - mean_group)

    Ahmadian et al. 2024, "Back to basics: Revisiting REINFORCE style optimization for learning from
    human feedback in LLMs", arXiv:2402.14740. The estimator is of Kool et al. 2019, "Buy 4 REINFORCE
    samples, get a baseline for free!".
    """
    scores = group_scores(inputs)
    others_S = (scores.size_S - 1).clamp(min=1)
    advantages_S = scores.centred_S * scores.size_S / others_S
    return AdvantageResult(to_tokens(advantages_S, inputs), stats=scores.stats)


def reinforce_pp(inputs: AdvantageInputs) -> AdvantageResult:
    """Discounted returns of the token rewards, whitened over the batch. Groups have no effect.

    Hu et al. 2025, "REINFORCE++: Stabilizing critic-free policy optimization with global advantage
    normalization", arXiv:2501.03262.
    """
    return AdvantageResult(whiten(discounted_returns(inputs, inputs.gamma), inputs.mask_N))


def reinforce_pp_baseline(inputs: AdvantageInputs) -> AdvantageResult:
    """score - mean_group of each token, whitened over the batch (arXiv:2501.03262, as `reinforce_pp`).

    The mean over the batch is not 0 when lengths differ, and would give the tokens of a group without signal
    an advantage that says nothing about them. Their 0 counts in mean and std as in the paper, and stays 0.
    """
    scores = group_scores(inputs)
    white_N = whiten(to_tokens(scores.centred_S, inputs), inputs.mask_N)
    advantages_N = white_N.masked_fill(~scores.signal_S[inputs.session_N], 0.0)
    return AdvantageResult(advantages_N, stats=scores.stats)


def remax(inputs: AdvantageInputs) -> AdvantageResult:
    """Undiscounted return of each sampled token minus the reward of the prompt's greedy answer.

    Li et al. 2023, "ReMax: A simple, effective, and efficient reinforcement learning method for
    aligning large language models", arXiv:2310.10505.
    """
    assert inputs.baseline_S is not None, "remax needs baseline_S, the greedy reward of each prompt"
    baseline_N = to_tokens(inputs.baseline_S, inputs)
    return AdvantageResult(discounted_returns(inputs, gamma=1.0) - baseline_N)


ADVANTAGES: dict[str, Callable[[AdvantageInputs], AdvantageResult]] = {
    name: globals()[name] for name in ESTIMATORS if name != "none"
}
