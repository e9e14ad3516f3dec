"""REINFORCE: the plain policy gradient, without a ratio.

    loss_t = -A_t logp_t

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning".
"""

from __future__ import annotations

import torch

from practicum.algorithms.policy_losses.ratios import (
    clamp_log_ratio,
    policy_terms,
    token_log_ratios,
)
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms


def reinforce(inputs: PolicyInputs) -> PolicyTerms:
    """-advantage * logprob; the old logprobs enter the statistics only."""
    logprobs_N, advantages_N = (
        x_N.masked_fill(~inputs.mask_N, 0.0) for x_N in (inputs.logprobs_N, inputs.advantages_N)
    )
    log_ratio_N, clamped_N = clamp_log_ratio(token_log_ratios(inputs).detach(), inputs.log_ratio_clamp)
    weight_N = torch.ones_like(log_ratio_N)
    return policy_terms(inputs, -advantages_N * logprobs_N, log_ratio_N, clamped_N, weight_N=weight_N)
