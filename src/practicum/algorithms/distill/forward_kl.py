"""Forward KL: the student covers all that the teacher would say. The divergence of supervised distillation.

    KL(q || p) = sum q log(q / p) = sum q (expm1(r) - r)     p: student, q: teacher, r = log(p / q)
    p d/dp = p - q

Hinton et al. 2015, "Distilling the knowledge in a neural network", arXiv:1503.02531.
"""

from __future__ import annotations

from practicum.algorithms.distill.buckets import kl_terms
from practicum.algorithms.distill.types import Buckets, BucketTerms


def forward_kl(buckets: Buckets) -> BucketTerms:
    """KL(teacher || student)."""
    value = kl_terms(buckets.q, buckets.p, -buckets.log_ratio)
    return BucketTerms(value, buckets.p - buckets.q)
