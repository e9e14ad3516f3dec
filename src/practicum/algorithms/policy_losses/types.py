"""What every policy loss takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PolicyInputs:
    """Packed tokens; the gradient flows into `logprobs_N` alone.

    The ratio is clipped to [1 - clip_low, 1 + clip_high]. `dual_clip` bounds the loss of tokens
    with a negative advantage, `log_ratio_clamp` bounds log-ratios to ± itself before anything else;
    None switches them off.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor
    session_N: Tensor
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    log_ratio_clamp: float | None = None


@dataclass(frozen=True)
class PolicyTerms:
    """Loss of each token, to be minimised, and detached statistics; all 0 at masked positions.

    Every loss gives `ratio`, `approx_kl` (k3 of KL(old || new)) and `log_ratio_clamped` (1 where it
    bit); those that clip give `clipped_low`, `clipped_high` and, if they know it, `dual_clipped`.
    `weight_N` is what the advantage is multiplied by in the gradient of the token's logprob, if they know it.
    """

    loss_N: Tensor
    stats_N: dict[str, Tensor]
    weight_N: Tensor | None = None
