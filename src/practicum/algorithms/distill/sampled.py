"""Divergences of the sampled token's logprob alone, d = log student(token) - log teacher(token).

    k1, k2, k3     estimators of the reverse KL, see `practicum.algorithms.kl`
    k1_straight    value of k1, gradient of k2: d times that of log student(token)
    k3_straight    value of k3, gradient of k2
    abs = |d|      mse = d^2

On policy and on average, the gradient of k2 is that of the reverse KL, and the gradient of k3 that of the
forward KL. The gradient of k1 is that of log student(token): it does not depend on the teacher and is 0 on
average, so k1 is for advantages and rewards. k3 grows as exp(-d) where the teacher is surer than the student,
and may want a clamp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from practicum.algorithms.distill.types import DistillTerms
from practicum.algorithms.kl import k1, k2, k3
from practicum.recipe.own_parts import find_part


def k1_straight(log_ratio_N: Tensor) -> Tensor:
    """k1 with the gradient of k2."""
    return _straight(k1, log_ratio_N)


def k3_straight(log_ratio_N: Tensor) -> Tensor:
    """k3 with the gradient of k2."""
    return _straight(k3, log_ratio_N)


def _straight(value: Callable[[Tensor], Tensor], log_ratio_N: Tensor) -> Tensor:
    slope_N = k2(log_ratio_N)
    return value(log_ratio_N).detach() + (slope_N - slope_N.detach())


SAMPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1_straight": k1_straight,
    "k3_straight": k3_straight,
    "abs": torch.abs,
    "mse": torch.square,
}


def sampled_divergence(
    kind: str, logprobs_N: Tensor, teacher_logprobs_N: Tensor, *, clamp: float | None = None
) -> DistillTerms:
    """Divergence of each sampled token; `clamp` bounds the log-ratio to ± itself."""
    divergence = find_part("sampled_divergence", kind, SAMPLED)
    log_ratio_N = logprobs_N - teacher_logprobs_N.detach()
    clamped_N = torch.zeros_like(log_ratio_N, dtype=torch.bool)
    if clamp is not None:
        clamped_N = log_ratio_N.detach().abs() > clamp
        log_ratio_N = log_ratio_N.clamp(-clamp, clamp)
    return DistillTerms(divergence(log_ratio_N), clamped_N)
