"""Generalised Jensen-Shannon divergence: between forward and reverse KL, and never above log 2.

    m = beta q + (1 - beta) p                                p: student, q: teacher, r = log(p / q)
    JSD = beta KL(q || m) + (1 - beta) KL(p || m)
    p d/dp = (1 - beta) p log(p / m),  log(p / m) = -log1p(beta expm1(-r))

JSD / beta goes to the forward KL as beta goes to 0, JSD / (1 - beta) to the reverse KL as beta goes to 1; JSD
itself goes to 0 at both ends.
Agarwal et al. 2023, "On-policy distillation of language models", arXiv:2306.13649.
"""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.algorithms.distill.buckets import kl_terms
from practicum.algorithms.distill.types import Buckets, BucketTerms

FAR = 60.0
"""A log-ratio whose exponential is far above all weights, and far below where float32 ends."""


def jsd(buckets: Buckets) -> BucketTerms:
    """JSD with the weight `beta` of the teacher in the mixture."""
    p, q, r, beta = buckets.p, buckets.q, buckets.log_ratio, buckets.beta
    log_p_m = _log_to_mixture(r, beta, 1.0 - beta)
    log_q_m = _log_to_mixture(-r, 1.0 - beta, beta)
    m = beta * q + (1.0 - beta) * p
    value = beta * kl_terms(q, m, log_q_m) + (1.0 - beta) * kl_terms(p, m, log_p_m)
    return BucketTerms(value, (1.0 - beta) * p * log_p_m)


def _log_to_mixture(log_ratio: Tensor, weight: float, rest: float) -> Tensor:
    """log(a / m) of m = rest a + weight b, with log_ratio = log(a / b): -log(rest + weight exp(-log_ratio)).

    log1p keeps the digits of what is near 0. Where b is next to nothing beside a, the plain sum keeps those
    of a `rest` near 0; where b is FAR greater, `rest` adds nothing.
    """
    apart = -log_ratio
    near = apart.clamp_max(FAR)
    shift = weight * torch.expm1(near)
    log_m = torch.where(shift > -0.5, shift.log1p(), (rest + weight * near.exp()).log())
    return (near - apart) - log_m
