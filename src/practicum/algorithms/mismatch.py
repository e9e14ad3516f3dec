"""Weights against the mismatch of two programs that should be one policy: the engine that sampled a
token, and the learner that learns from it.

    d_t = log learner(token), before the step's first update - log rollout(token)
    r = exp(d_t) of each token, or exp(sum of d_t over the sampled tokens of its session)
    w = min(r, cap)

The weight carries no gradient and is never negative, so every policy loss times w is that loss with
w times the advantage.

Truncated: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training". By session: Liu et al. 2025, "When speed kills
stability: demystifying RL collapse from the training-inference mismatch".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from practicum.algorithms.segments import segment_sum


@dataclass(frozen=True)
class MismatchWeights:
    """Weight of each token (0 at masked positions), and where the cap held (bool).

    `stats` has the mean weight and the share of capped tokens, over sampled tokens.
    """

    weights_N: Tensor
    capped_N: Tensor
    stats: dict[str, float]


def mismatch_weights(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    session_N: Tensor,
    ratio: Literal["token", "sequence"],
    cap: float,
) -> MismatchWeights:
    """Return the weights of a whole batch. Needs all tokens of a session in one call."""
    weights_N, capped_N = torch.zeros_like(old_logprobs_N), torch.zeros_like(mask_N)
    session_M = session_N[mask_N]
    if not len(session_M):
        return MismatchWeights(weights_N, capped_N, {})
    log_ratio_M = (old_logprobs_N[mask_N].double() - rollout_logprobs_N[mask_N].double()).detach()
    if ratio == "sequence":
        log_ratio_M = segment_sum(log_ratio_M, session_M, int(session_M.max()) + 1)[session_M]
    weight_M = log_ratio_M.clamp(max=math.log(cap)).exp()  # capped before exp, which can't overflow then
    capped_M = log_ratio_M > math.log(cap)
    weights_N[mask_N], capped_N[mask_N] = weight_M.to(weights_N.dtype), capped_M
    stats = {"mismatch_truncated": float(capped_M.double().mean()), "mismatch_weight": float(weight_M.mean())}
    return MismatchWeights(weights_N, capped_N, stats)
