"""The divergences by the names that a recipe gives them, and the signals that each can be computed from.

Which of these pairs make sense in a recipe is said, in words, by `practicum.recipe.checks.divergences`.
"""

from __future__ import annotations

from collections.abc import Callable

from practicum.algorithms.distill.forward_kl import forward_kl
from practicum.algorithms.distill.jsd import jsd
from practicum.algorithms.distill.reverse_kl import reverse_kl
from practicum.algorithms.distill.sampled import SAMPLED
from practicum.algorithms.distill.types import Buckets, BucketTerms
from practicum.recipe.own_parts import find_part

Compare = Callable[[Buckets], BucketTerms]

DISTRIBUTIONS: dict[str, Compare] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}

PAIRS: tuple[tuple[str, str], ...] = (
    *((name, signal) for name in DISTRIBUTIONS for signal in ("top_k", "full")),
    *((name, "sampled") for name in SAMPLED),
)
"""Each divergence with each signal that it can be computed from."""


def distribution_divergence(kind: str) -> Compare:
    """The divergence of distributions with this name."""
    return find_part("divergence", kind, DISTRIBUTIONS)
