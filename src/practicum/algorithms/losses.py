"""Losses of the policy and of the critic.

A policy loss is a pure function of `PolicyInputs` that returns the loss of every token, found by its name in
the table of traits. `practicum.algorithms.aggregation` makes one number of them. Importance ratios stay in
log space, so that a ratio which a clip discards can't overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algorithms.kl import finite_exp, finite_expm1
from practicum.algorithms.segments import segment_mean
from practicum.recipe.algorithm_traits import LOSSES


@dataclass(frozen=True)
class PolicyInputs:
    """Packed tokens. Only `logprobs_N` has a gradient.

    The ratio is clipped to [1 - clip_low, 1 + clip_high].
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor
    session_N: Tensor
    clip_low: float
    clip_high: float


@dataclass(frozen=True)
class PolicyTerms:
    """Loss of each token, to be minimised, and detached statistics. All are 0 at masked positions.

    Every loss has `ratio` and `approx_kl` (k3 of KL(old || new)). Those that clip have `clipped_low` and
    `clipped_high`. `weight_N` is the advantage's factor in the gradient of the token's logprob, if known.
    """

    loss_N: Tensor
    stats_N: dict[str, Tensor]
    weight_N: Tensor | None = None


def token_log_ratios(inputs: PolicyInputs) -> Tensor:
    """Return log new(token) - log old(token), and 0 at masked positions."""
    return (inputs.logprobs_N - inputs.old_logprobs_N).masked_fill(~inputs.mask_N, 0.0)


def log_clip_range(inputs: PolicyInputs) -> tuple[float, float]:
    """Return the logarithms of 1 - clip_low (minus infinity from clip_low = 1 on) and of 1 + clip_high."""
    low = math.log1p(-inputs.clip_low) if inputs.clip_low < 1 else -math.inf
    return low, math.log1p(inputs.clip_high)


def clipped_surrogate(log_ratio_N: Tensor, inputs: PolicyInputs) -> PolicyTerms:
    """Return -min(r A, clip(r) A), and where each clip held.

    The minimum takes the upper clip only for A > 0 and the lower one only for A < 0, so it is -A
    times the ratio between bounds that depend on the sign of A.
    """
    advantages_N = inputs.advantages_N.masked_fill(~inputs.mask_N, 0.0)
    low, high = log_clip_range(inputs)
    negative_N, detached_N = advantages_N < 0, log_ratio_N.detach()
    lower_N = torch.full_like(detached_N, -math.inf).masked_fill(negative_N, low)
    upper_N = torch.full_like(detached_N, high).masked_fill(negative_N, math.inf)
    loss_N = -advantages_N * finite_exp(log_ratio_N.clamp(lower_N, upper_N))
    clips = {
        "clipped_low": negative_N & (detached_N < low),
        "clipped_high": (advantages_N > 0) & (detached_N > high),
    }
    return policy_terms(inputs, loss_N, log_ratio_N, clips)


def policy_terms(
    inputs: PolicyInputs,
    loss_N: Tensor,
    log_ratio_N: Tensor,
    clips: dict[str, Tensor] | None = None,
    weight_N: Tensor | None = None,
) -> PolicyTerms:
    """Return the loss with its statistics, all masked. `log_ratio_N` is the one that the loss uses.

    Without a weight it is the ratio, but 0 where a clip held and so no gradient is left.
    """
    token_N = token_log_ratios(inputs).detach()
    stats = {
        "ratio": finite_exp(log_ratio_N.detach()),
        "approx_kl": finite_expm1(token_N) - token_N,
        **(clips or {}),
    }
    if weight_N is None:
        weight_N = stats["ratio"]
        for held_N in (clips or {}).values():
            weight_N = weight_N.masked_fill(held_N, 0.0)
    return PolicyTerms(
        loss_N.masked_fill(~inputs.mask_N, 0.0),
        {name: x_N.detach().to(loss_N.dtype).masked_fill(~inputs.mask_N, 0.0) for name, x_N in stats.items()},
        weight_N.detach().masked_fill(~inputs.mask_N, 0.0),
    )


def ppo_clip(inputs: PolicyInputs) -> PolicyTerms:
    """PPO's clipped objective, with separate lower and upper ranges.

        r_t = exp(logp_t - old_logp_t)
        loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347; asymmetric range:
    Yu et al. 2025, "DAPO", arXiv:2503.14476.
    """
    return clipped_surrogate(token_log_ratios(inputs), inputs)


def gspo(inputs: PolicyInputs) -> PolicyTerms:
    """PPO's clipped objective with one ratio for the whole session, in the token form (GSPO-token).

        s = exp(mean over the session's sampled tokens of (logp_t - old_logp_t))
        s_t = sg[s] exp(logp_t - sg[logp_t])     sg: stop-gradient; the value of s_t is s
        loss_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

    Zheng et al. 2025, "Group sequence policy optimization", arXiv:2507.18071. Needs all tokens of a session
    in one call. With one advantage for a session and aggregated by seq_mean_token_mean, value and gradient
    are those of the sequence-level objective. The paper's ranges are narrow, about 3e-4.
    """
    mask_N, session_N = inputs.mask_N, inputs.session_N
    sessions = int(session_N.max()) + 1 if len(session_N) else 0
    token_ratio_M = token_log_ratios(inputs).detach()[mask_N]
    mean_S = segment_mean(token_ratio_M, session_N[mask_N], sessions)
    logprobs_N = inputs.logprobs_N.masked_fill(~mask_N, 0.0)
    return clipped_surrogate(mean_S[session_N] + (logprobs_N - logprobs_N.detach()), inputs)


def cispo(inputs: PolicyInputs) -> PolicyTerms:
    """REINFORCE weighted by a clipped importance ratio without gradient, so every token keeps its own.

        loss_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logp_t     sg: stop-gradient

    MiniMax 2025, "MiniMax-M1: Scaling test-time compute efficiently with lightning attention",
    arXiv:2506.13585. clip_low = 1 or more means no lower bound, as in the paper's runs. Clips hold
    whatever the sign of the advantage.
    """
    log_ratio_N = token_log_ratios(inputs).detach()
    low, high = log_clip_range(inputs)
    weight_N = log_ratio_N.clamp(low, high).exp()
    logprobs_N = inputs.logprobs_N.masked_fill(~inputs.mask_N, 0.0)
    loss_N = -(weight_N * inputs.advantages_N).masked_fill(~inputs.mask_N, 0.0) * logprobs_N
    clips = {"clipped_low": log_ratio_N < low, "clipped_high": log_ratio_N > high}
    return policy_terms(inputs, loss_N, log_ratio_N, clips, weight_N)


def dppo(inputs: PolicyInputs) -> PolicyTerms:
    """The policy gradient by its ratio to the policy that sampled, without tokens that have moved too far.

        r_t = exp(logp_t - sampled_logp_t)      d_t = exp(logp_t) - exp(sampled_logp_t)
        loss_t = -r_t A_t, but 0 where A_t > 0 and d_t > clip_high, or A_t < 0 and d_t < -clip_low

    A ratio is large wherever a token was unlikely, however little its probability has moved; the change of
    the probability bounds the total variation between the two policies. Qi et al. 2026, "Rethinking the trust
    region in LLM reinforcement learning", arXiv:2602.04879 (the binary TV variant).
    """
    log_ratio_N = token_log_ratios(inputs)
    advantages_N = inputs.advantages_N.masked_fill(~inputs.mask_N, 0.0)
    change_N = inputs.logprobs_N.detach().exp() - inputs.old_logprobs_N.exp()
    clips = {
        "clipped_low": (advantages_N < 0) & (change_N < -inputs.clip_low),
        "clipped_high": (advantages_N > 0) & (change_N > inputs.clip_high),
    }
    loss_N = -advantages_N * finite_exp(log_ratio_N)
    for held_N in clips.values():
        loss_N = loss_N.masked_fill(held_N, 0.0)
    return policy_terms(inputs, loss_N, log_ratio_N, clips)


def reinforce(inputs: PolicyInputs) -> PolicyTerms:
    """-advantage * logprob, the plain policy gradient. The old logprobs enter the statistics only.

    Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning".
    """
    logprobs_N, advantages_N = (
        x_N.masked_fill(~inputs.mask_N, 0.0) for x_N in (inputs.logprobs_N, inputs.advantages_N)
    )
    log_ratio_N = token_log_ratios(inputs).detach()
    weight_N = torch.ones_like(log_ratio_N)
    return policy_terms(inputs, -advantages_N * logprobs_N, log_ratio_N, weight_N=weight_N)


POLICY_LOSSES: dict[str, Callable[[PolicyInputs], PolicyTerms]] = {
    name: globals()[name] for name in LOSSES if name != "supervised"
}


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the values, clipped: moving more than `clip` from the old values gains
    nothing.

    loss_t = max((v_t - R_t)^2, (clip(v_t, v_old_t - eps, v_old_t + eps) - R_t)^2) / 2

    Schulman et al. 2017, arXiv:1707.06347; the value clip is that of the authors' implementation (OpenAI
    baselines). Also returns 1 for each token that the clip held.
    """
    loss_N = 0.5 * (values_N - returns_N).square()
    clipped_N = torch.zeros_like(loss_N, requires_grad=False)
    if clip is not None:
        held_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
        held_loss_N = 0.5 * (held_N - returns_N).square()
        clipped_N = (held_loss_N > loss_N).to(loss_N.dtype)
        loss_N = torch.maximum(loss_N, held_loss_N)
    return loss_N, clipped_N
