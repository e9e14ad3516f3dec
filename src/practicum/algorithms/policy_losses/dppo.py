"""DPPO: the policy gradient by its ratio to the policy that sampled, without the tokens whose probability has
moved too far already.

    r_t = exp(logp_t - sampled_logp_t)      d_t = exp(logp_t) - exp(sampled_logp_t)
    loss_t = -r_t A_t, but 0 where A_t > 0 and d_t > clip_high, or A_t < 0 and d_t < -clip_low

A ratio is large wherever a token was unlikely, however little its probability has moved; the change of the
probability is a bound of the total variation between the two policies. Qi et al. 2026, "Rethinking the trust
region in LLM reinforcement learning", arXiv:2602.04879 (the binary TV variant).
"""

from __future__ import annotations

from practicum.algorithms.exponentials import finite_exp
from practicum.algorithms.policy_losses.ratios import clamp_log_ratio, policy_terms, token_log_ratios
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms


def dppo(inputs: PolicyInputs) -> PolicyTerms:
    """-ratio * advantage of the tokens whose probability may still move in the advantage's direction."""
    log_ratio_N, clamped_N = clamp_log_ratio(token_log_ratios(inputs), inputs.log_ratio_clamp)
    advantages_N = inputs.advantages_N.masked_fill(~inputs.mask_N, 0.0)
    change_N = inputs.logprobs_N.detach().exp() - inputs.old_logprobs_N.exp()
    clips = {
        "clipped_low": (advantages_N < 0) & (change_N < -inputs.clip_low),
        "clipped_high": (advantages_N > 0) & (change_N > inputs.clip_high),
    }
    loss_N = -advantages_N * finite_exp(log_ratio_N)
    for held_N in clips.values():
        loss_N = loss_N.masked_fill(held_N, 0.0)
    return policy_terms(inputs, loss_N, log_ratio_N, clamped_N, clips)
