"""PPO's clipped objective, with separate lower and upper ranges and an optional dual clip.

    r_t = exp(logp_t - old_logp_t)
    loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    where A_t < 0, with a dual clip: loss_t at most -dual_clip A_t

Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347; asymmetric range:
Yu et al. 2025, "DAPO", arXiv:2503.14476; dual clip: Ye et al. 2019, "Mastering complex control in
MOBA games", arXiv:1912.09729.
"""

from __future__ import annotations

from practicum.algorithms.policy_losses.ratios import (
    clamp_log_ratio,
    clipped_surrogate,
    policy_terms,
    token_log_ratios,
)
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms


def ppo_clip(inputs: PolicyInputs) -> PolicyTerms:
    """Clipped surrogate of each token by its own ratio."""
    log_ratio_N, clamped_N = clamp_log_ratio(token_log_ratios(inputs), inputs.log_ratio_clamp)
    loss_N, clips = clipped_surrogate(log_ratio_N, inputs)
    return policy_terms(inputs, loss_N, log_ratio_N, clamped_N, clips)
