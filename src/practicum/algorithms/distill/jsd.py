"""Generalised Jensen-Shannon divergence: between forward and reverse KL, and never above log 2.

    m = beta q + (1 - beta) p                                p: student, q: teacher, r = log(p / q)
    JSD = beta KL(q || m) + (1 - beta) KL(p || m)
    p d/dp = (1 - beta) p log(p / m),  log(p / m) = -log1p(beta expm1(-r))

JSD / beta goes to the forward KL as beta goes to 0, JSD / (1 - beta) to the reverse KL as beta goes to 1.
Agarwal et al. 2023, "On-policy distillation of language models", arXiv:2306.13649.
"""

from __future__ import annotations

import torch

from practicum.algorithms.distill.buckets import kl_terms
from practicum.algorithms.distill.types import Buckets, BucketTerms


def jsd(buckets: Buckets) -> BucketTerms:
    """JSD with the weight `beta` of the teacher in the mixture."""
    p, q, r, beta = buckets.p, buckets.q, buckets.log_ratio, buckets.beta
    # log m relative to the greater of p and q, so that no exponential overflows.
    lesser = torch.full_like(r, 1.0 - beta).masked_fill_(r >= 0, beta)
    log_m = lesser.mul_(torch.expm1(-r.abs())).log1p_()
    log_p_m = r.clamp_max(0.0) - log_m
    log_q_m = -(r.clamp_min(0.0) + log_m)
    m = beta * q + (1.0 - beta) * p
    value = beta * kl_terms(q, m, log_q_m) + (1.0 - beta) * kl_terms(p, m, log_p_m)
    return BucketTerms(value, (1.0 - beta) * p * log_p_m)
