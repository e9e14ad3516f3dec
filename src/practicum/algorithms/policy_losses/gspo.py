"""GSPO: PPO's clipped objective with one ratio for the whole session, in the token form of the
paper (GSPO-token).

    s = exp(mean over the session's sampled tokens of (logp_t - old_logp_t))
    s_t = sg[s] exp(logp_t - sg[logp_t])     sg: stop-gradient; the value of s_t is s
    loss_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

Zheng et al. 2025, "Group sequence policy optimization", arXiv:2507.18071. With one advantage for a
session and aggregated by seq_mean_token_mean, value and gradient are those of the sequence-level
objective. The paper's ranges are narrow, about 3e-4. log_ratio_clamp bounds log s; dual_clip works
as in PPO.
"""

from __future__ import annotations

from practicum.algorithms.policy_losses.ratios import (
    clamp_log_ratio,
    clipped_surrogate,
    policy_terms,
    token_log_ratios,
)
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms
from practicum.algorithms.segments import segment_mean


def gspo(inputs: PolicyInputs) -> PolicyTerms:
    """Clipped surrogate by the session's ratio; needs all tokens of a session in one call."""
    mask_N, session_N = inputs.mask_N, inputs.session_N
    sessions = int(session_N.max()) + 1 if len(session_N) else 0
    token_ratio_M = token_log_ratios(inputs).detach()[mask_N]
    mean_S = segment_mean(token_ratio_M, session_N[mask_N], sessions)
    logprobs_N = inputs.logprobs_N.masked_fill(~mask_N, 0.0)
    log_ratio_N, clamped_N = clamp_log_ratio(
        mean_S[session_N] + (logprobs_N - logprobs_N.detach()), inputs.log_ratio_clamp
    )
    loss_N, clips = clipped_surrogate(log_ratio_N, inputs)
    return policy_terms(inputs, loss_N, log_ratio_N, clamped_N, clips)
