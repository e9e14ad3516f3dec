"""Reverse KL: the student keeps to what the teacher finds likely. The usual divergence on policy.

    KL(p || q) = sum p log(p / q) = sum p (r + expm1(-r))     p: student, q: teacher, r = log(p / q)
    p d/dp = p r

Gu et al. 2023, "MiniLLM", arXiv:2306.08543; Agarwal et al. 2023, "On-policy distillation of language models",
arXiv:2306.13649.
"""

from __future__ import annotations

from practicum.algorithms.distill.buckets import kl_terms
from practicum.algorithms.distill.types import Buckets, BucketTerms


def reverse_kl(buckets: Buckets) -> BucketTerms:
    """KL(student || teacher)."""
    value = kl_terms(buckets.p, buckets.q, buckets.log_ratio)
    return BucketTerms(value, buckets.p * buckets.log_ratio)
