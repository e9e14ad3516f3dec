"""Returns: what a session still earns from a token on."""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.algorithms.advantages.types import AdvantageInputs
from practicum.algorithms.segments import discounted_sum_ahead, sampled_in_session_order


def discounted_returns(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over a session's sampled tokens; 0 at masked positions."""
    order_M = sampled_in_session_order(inputs.mask_N, inputs.session_N)
    rewards_M, session_M = inputs.token_rewards_N[order_M], inputs.session_N[order_M]
    returns_N = torch.zeros_like(inputs.token_rewards_N)
    returns_N[order_M] = discounted_sum_ahead(rewards_M, session_M, gamma)
    return returns_N
