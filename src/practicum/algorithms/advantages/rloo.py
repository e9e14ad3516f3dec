"""RLOO: REINFORCE with the mean of the other answers to the same prompt as baseline.

    A_t = score - sum_{others} score / (n - 1)     for every sampled token, n: sessions of the group
        = n / (n - 1) * (score - mean_group)

Ahmadian et al. 2024, "Back to basics: Revisiting REINFORCE style optimization for learning from
human feedback in LLMs", arXiv:2402.14740; the estimator is of Kool et al. 2019, "Buy 4 REINFORCE
samples, get a baseline for free!".
"""

from __future__ import annotations

from practicum.algorithms.advantages.groups import group_scores, to_tokens
from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult


def rloo(inputs: AdvantageInputs) -> AdvantageResult:
    """Score minus the mean of the group's others; 0 for a group of one and for a flat group."""
    scores = group_scores(inputs)
    others_S = (scores.size_S - 1).clamp(min=1)
    advantages_S = scores.centred_S * scores.size_S / others_S
    return AdvantageResult(to_tokens(advantages_S, inputs), stats=scores.stats)
