"""GAE: an exponential mean of the critic's temporal differences.

    delta_t = r_t + gamma V_{t+1} - V_t     V after the session's last sampled token is 0
    A_t = delta_t + gamma lam A_{t+1},  return_t = A_t + V_t

Schulman et al. 2015, "High-dimensional continuous control using generalized advantage estimation",
arXiv:1506.02438. Steps are a session's sampled tokens: what a tool or template put between two of
them is skipped over, not a step.
"""

from __future__ import annotations

import torch

from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult
from practicum.algorithms.advantages.whitening import whiten
from practicum.algorithms.segments import (
    discounted_sum_ahead,
    next_in_segment,
    sampled_in_session_order,
)


def gae(inputs: AdvantageInputs) -> AdvantageResult:
    """Advantages, whitened over the sampled tokens if `whiten`, and the critic's plain returns."""
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
