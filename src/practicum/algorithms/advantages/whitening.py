"""Whitening: mean 0 and standard deviation 1 over the sampled tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.algorithms.advantages.types import EPS


def whiten(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6) over the sampled tokens, std unbiased; 0 at masked positions.

    Where nothing varies (a single sampled token, or all of them equal) the result is exactly 0.
    """
    white_N = torch.zeros_like(values_N)
    sampled_M = values_N[mask_N]
    if len(sampled_M) > 1 and sampled_M.min() != sampled_M.max():
        white_N[mask_N] = (sampled_M - sampled_M.mean()) / (sampled_M.std() + EPS)
    return white_N
