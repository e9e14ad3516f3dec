"""Weights against the mismatch of two programs that should be one policy: the engine that sampled a
token, and the learner that learns from it.

    d_t = log learner(token), before the step's first update - log rollout(token)
    r = exp(d_t) of each token, or exp(sum of d_t over the sampled tokens of its session)
    truncate: w = min(r, cap)
    mask:     w = r where floor <= r <= cap, else 0
    reject:   w = 0 in sessions with exp(mean of d_t) outside [low, high]

The weight carries no gradient and is never negative, so every policy loss times w is that loss with
w times the advantage.

Truncated: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training". Masked on two sides: IcePop, Ling Team 2025,
"Every step evolves", arXiv:2510.18855. By session and geometric mean: Liu et al. 2025, "When speed
kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from practicum.algorithms.segments import segment_count, segment_mean, segment_sum


@dataclass(frozen=True)
class MismatchRules:
    """Which ratio weighs a token, what happens outside its bounds, and which sessions are left out.

    `floor` is read by `mask` alone; a `floor` or `reject` from 0 on has no lower bound.
    """

    weights: Literal["off", "token", "sequence"] = "off"
    outside: Literal["truncate", "mask"] = "truncate"
    cap: float = 2.0
    floor: float = 0.0
    reject: tuple[float, float] | None = None


@dataclass(frozen=True)
class MismatchWeights:
    """Weight of each token (0 at masked positions), and what the rules did: where each held, and counts.

    `mismatch_weight` is the mean over sampled tokens, `mismatch_truncated` and `mismatch_masked` are
    shares of them, `mismatch_rejected` of the sessions that have any; each rule counts by itself, and
    one that is off is not there.
    """

    weights_N: Tensor
    stats: dict[str, float]
    held_N: dict[str, Tensor] = field(default_factory=dict)
    """By `mismatch_truncate`, `mismatch_mask` and `mismatch_reject`, bool."""


def mismatch_weights(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    mask_N: Tensor,
    session_N: Tensor,
    rules: MismatchRules,
) -> MismatchWeights:
    """The weights of a whole batch; needs all tokens of a session in one call."""
    session_M = session_N[mask_N]
    if not len(session_M):
        return MismatchWeights(torch.zeros_like(old_logprobs_N), {})
    sessions = int(session_M.max()) + 1
    log_ratio_M = (old_logprobs_N[mask_N].double() - rollout_logprobs_N[mask_N].double()).detach()
    weight_M, stats, held_M = torch.ones_like(log_ratio_M), {}, {}
    if rules.weights != "off":
        chosen_M = log_ratio_M
        if rules.weights == "sequence":
            chosen_M = segment_sum(log_ratio_M, session_M, sessions)[session_M]
        weight_M, outside_M = _bounded(chosen_M, rules)
        stats["mismatch_masked" if rules.outside == "mask" else "mismatch_truncated"] = _share(outside_M)
        held_M[f"mismatch_{rules.outside}"] = outside_M
    if rules.reject is not None:
        out_S = _outside(segment_mean(log_ratio_M, session_M, sessions), *rules.reject)
        weight_M = weight_M.masked_fill(out_S[session_M], 0.0)
        held_M["mismatch_reject"] = out_S[session_M]
        stats["mismatch_rejected"] = _share(out_S[segment_count(session_M, sessions) > 0])
    stats["mismatch_weight"] = float(weight_M.mean())
    weights_N = torch.zeros_like(old_logprobs_N)
    weights_N[mask_N] = weight_M.to(weights_N.dtype)
    held_N = {rule: torch.zeros_like(mask_N).masked_scatter(mask_N, held) for rule, held in held_M.items()}
    return MismatchWeights(weights_N, stats, held_N)


def _bounded(log_ratio_M: Tensor, rules: MismatchRules) -> tuple[Tensor, Tensor]:
    """The weights, and where a bound held (bool). The cap comes before exp, which can't overflow then."""
    ratio_M = log_ratio_M.clamp(max=math.log(rules.cap)).exp()
    if rules.outside == "truncate":
        return ratio_M, log_ratio_M > math.log(rules.cap)
    outside_M = _outside(log_ratio_M, rules.floor, rules.cap)
    return ratio_M.masked_fill(outside_M, 0.0), outside_M


def _outside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Where a ratio is below `low` or above `high` (bool)."""
    least = math.log(low) if low > 0 else -math.inf
    return (log_ratio < least) | (log_ratio > math.log(high))


def _share(held: Tensor) -> float:
    return float(held.double().mean())
