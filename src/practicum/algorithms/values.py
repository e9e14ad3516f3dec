"""The critic's loss, clipped as the policy's is.

    loss_t = max((v_t - R_t)^2, (clip(v_t, v_old_t - eps, v_old_t + eps) - R_t)^2) / 2

Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347; the value clip is
that of the authors' implementation (OpenAI baselines).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueTerms:
    """Loss of each token (0 at masked positions), and detached per-token statistics."""

    loss_N: Tensor
    stats_N: dict[str, Tensor]


def value_loss(
    values_N: Tensor,
    old_values_N: Tensor,
    returns_N: Tensor,
    mask_N: Tensor,
    clip: float | None,
) -> ValueTerms:
    """Squared error of the values; nothing is gained by moving more than `clip` from the old ones.

    Without `clip` it is half the squared error. Statistic: `value_clipped`, tokens held by the
    clip.
    """
    values_N, old_values_N, returns_N = (
        x_N.masked_fill(~mask_N, 0.0) for x_N in (values_N, old_values_N, returns_N)
    )
    loss_N = 0.5 * (values_N - returns_N).square()
    clipped_N = torch.zeros_like(loss_N, requires_grad=False)
    if clip is not None:
        held_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
        held_loss_N = 0.5 * (held_N - returns_N).square()
        clipped_N = (held_loss_N > loss_N).to(loss_N.dtype)
        loss_N = torch.maximum(loss_N, held_loss_N)
    return ValueTerms(loss_N, {"value_clipped": clipped_N})
