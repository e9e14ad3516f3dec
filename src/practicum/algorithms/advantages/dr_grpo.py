"""Dr. GRPO: GRPO without the division by the group's standard deviation.

    A_t = score - mean_group     for every sampled token of the session

Liu et al. 2025, "Understanding R1-Zero-like training: A critical perspective", arXiv:2503.20783.
"""

from __future__ import annotations

from practicum.algorithms.advantages.groups import group_scores, to_tokens
from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult


def dr_grpo(inputs: AdvantageInputs) -> AdvantageResult:
    """Score minus the group's mean; 0 for a group of one and for a flat group."""
    scores = group_scores(inputs)
    return AdvantageResult(to_tokens(scores.centred_S, inputs), stats=scores.stats)
