"""The term that all divergences of distributions are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_terms(a: Tensor, b: Tensor, log_ratio: Tensor) -> Tensor:
    """a log(a / b) + b - a of each bucket, with log_ratio = log a - log b: >= 0, and sums to KL(a || b).

    As b and a both sum to 1, b - a adds nothing to the sum; it makes each term >= 0 and cancels an error that
    all log-ratios have in common, such as that of a normaliser.
    """
    # a (d + expm1(-d)) keeps the digits of a small d, but overflows where b is very much greater than a.
    near = a * (log_ratio + torch.expm1(-log_ratio))
    return torch.where(log_ratio > -1.0, near, a * log_ratio + (b - a))
