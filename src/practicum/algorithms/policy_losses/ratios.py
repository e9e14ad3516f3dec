"""Importance ratios, in log space so that a ratio which a clip discards can't overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from practicum.algorithms.exponentials import finite_exp, finite_expm1
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms


def token_log_ratios(inputs: PolicyInputs) -> Tensor:
    """log new(token) - log old(token), not clamped; 0 at masked positions."""
    return (inputs.logprobs_N - inputs.old_logprobs_N).masked_fill(~inputs.mask_N, 0.0)


def clamp_log_ratio(log_ratio_N: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """The log-ratio within ± `limit`, and where that changed it (bool)."""
    if limit is None:
        return log_ratio_N, torch.zeros_like(log_ratio_N, dtype=torch.bool)
    return log_ratio_N.clamp(-limit, limit), log_ratio_N.detach().abs() > limit


def log_clip_range(inputs: PolicyInputs) -> tuple[float, float]:
    """Logarithms of 1 - clip_low (minus infinity from clip_low = 1 on) and of 1 + clip_high."""
    low = math.log1p(-inputs.clip_low) if inputs.clip_low < 1 else -math.inf
    return low, math.log1p(inputs.clip_high)


def clipped_surrogate(log_ratio_N: Tensor, inputs: PolicyInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A), at most dual_clip |A| where A < 0; with where each clip held (bool).

    The minimum takes the upper clip only for A > 0 and the lower one only for A < 0, so it is -A
    times the ratio between bounds that depend on the sign of A.
    """
    advantages_N = inputs.advantages_N.masked_fill(~inputs.mask_N, 0.0)
    low, high = log_clip_range(inputs)
    dual = math.inf if inputs.dual_clip is None else math.log(inputs.dual_clip)
    negative_N, detached_N = advantages_N < 0, log_ratio_N.detach()
    lower_N = torch.full_like(detached_N, -math.inf).masked_fill(negative_N, low)
    upper_N = torch.full_like(detached_N, high).masked_fill(negative_N, dual)
    loss_N = -advantages_N * finite_exp(log_ratio_N.clamp(lower_N, upper_N))
    return loss_N, {
        "clipped_low": negative_N & (detached_N < low),
        "clipped_high": (advantages_N > 0) & (detached_N > high),
        "dual_clipped": negative_N & (detached_N > dual),
    }


def policy_terms(
    inputs: PolicyInputs,
    loss_N: Tensor,
    log_ratio_N: Tensor,
    clamped_N: Tensor,
    clips: dict[str, Tensor] | None = None,
    weight_N: Tensor | None = None,
) -> PolicyTerms:
    """Puts the loss together with its statistics, and masks them all; the log-ratio is the loss's own.

    Without a weight it is the ratio, but 0 where a clip held and so no gradient is left.
    """
    token_N, _ = clamp_log_ratio(token_log_ratios(inputs).detach(), inputs.log_ratio_clamp)
    stats = {
        "ratio": finite_exp(log_ratio_N.detach()),
        "approx_kl": finite_expm1(token_N) - token_N,
        "log_ratio_clamped": clamped_N,
        **(clips or {}),
    }
    if weight_N is None:
        weight_N = stats["ratio"]
        for held_N in (clamped_N, *(clips or {}).values()):
            weight_N = weight_N.masked_fill(held_N, 0.0)
    return PolicyTerms(
        loss_N.masked_fill(~inputs.mask_N, 0.0),
        {name: x_N.detach().to(loss_N.dtype).masked_fill(~inputs.mask_N, 0.0) for name, x_N in stats.items()},
        weight_N.detach().masked_fill(~inputs.mask_N, 0.0),
    )
