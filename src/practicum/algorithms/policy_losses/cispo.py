"""CISPO: REINFORCE weighted by a clipped importance ratio that carries no gradient, so every token
keeps its own.

    r_t = exp(logp_t - old_logp_t)
    loss_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logp_t     sg: stop-gradient

MiniMax 2025, "MiniMax-M1: Scaling test-time compute efficiently with lightning attention",
arXiv:2506.13585. clip_low = 1 or more means no lower bound, as in the paper's runs. There is no
dual clip here: the weight is bounded already.
"""

from __future__ import annotations

from practicum.algorithms.policy_losses.ratios import (
    clamp_log_ratio,
    log_clip_range,
    policy_terms,
    token_log_ratios,
)
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms


def cispo(inputs: PolicyInputs) -> PolicyTerms:
    """-weight * advantage * logprob; clips bite whatever the sign of the advantage."""
    log_ratio_N, clamped_N = clamp_log_ratio(token_log_ratios(inputs).detach(), inputs.log_ratio_clamp)
    low, high = log_clip_range(inputs)
    weight_N = log_ratio_N.clamp(low, high).exp()
    logprobs_N = inputs.logprobs_N.masked_fill(~inputs.mask_N, 0.0)
    loss_N = -(weight_N * inputs.advantages_N).masked_fill(~inputs.mask_N, 0.0) * logprobs_N
    clips = {"clipped_low": log_ratio_N < low, "clipped_high": log_ratio_N > high}
    return policy_terms(inputs, loss_N, log_ratio_N, clamped_N, clips, weight_N)
