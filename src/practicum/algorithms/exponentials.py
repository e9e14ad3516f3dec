"""Exponentials of log-ratios that can't overflow: beyond a limit they continue along their tangent.

Up to the limit (66 in float32, 532 in float64: 3/4 of where the number type ends) they are exp and expm1, bit
for bit. Beyond it value and slope are too small, but finite and of the right sign.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def finite_exp(x: Tensor) -> Tensor:
    """exp(x), and its tangent beyond the limit."""
    limit = _limit(x)
    return x.clamp(max=limit).exp() * (1.0 + (x - limit).clamp(min=0.0))


def finite_expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 with the digits of a small x, and its tangent beyond the limit."""
    limit = _limit(x)
    return torch.expm1(x.clamp(max=limit)) + math.exp(limit) * (x - limit).clamp(min=0.0)


def _limit(x: Tensor) -> float:
    return 0.75 * math.log(torch.finfo(x.dtype).max)
