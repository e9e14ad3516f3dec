"""GRPO: the score relative to the group of answers to the same prompt.

    A_t = (score - mean_group) / (std_group + 1e-6)     for every sampled token of the session

The standard deviation is the unbiased one.

Shao et al. 2024, "DeepSeekMath: Pushing the limits of mathematical reasoning in open language
models", arXiv:2402.03300.
"""

from __future__ import annotations

from practicum.algorithms.advantages.groups import group_scores, to_tokens
from practicum.algorithms.advantages.types import EPS, AdvantageInputs, AdvantageResult


def grpo(inputs: AdvantageInputs) -> AdvantageResult:
    """Standard score within the group; 0 for a group of one and for a flat group."""
    scores = group_scores(inputs)
    advantages_S = scores.centred_S / (scores.std_S + EPS)
    return AdvantageResult(to_tokens(advantages_S, inputs), stats=scores.stats)
