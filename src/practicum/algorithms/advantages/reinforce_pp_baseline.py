"""REINFORCE++ with baseline: the score minus its group's mean, whitened over the batch.

    B_t = score - mean_group     for every sampled token of the session
    A_t = (B_t - mean_batch) / (std_batch + 1e-6)     over the sampled tokens of the batch

Hu et al. 2025, "REINFORCE++: Stabilizing critic-free policy optimization with global advantage
normalization", arXiv:2501.03262. The mean over the batch is not 0 when lengths differ, and would
give the tokens of a group without signal an advantage that says nothing about them. Their B_t = 0
counts in mean and std as in the paper, and A_t is 0.
"""

from __future__ import annotations

from practicum.algorithms.advantages.groups import group_scores, to_tokens
from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult
from practicum.algorithms.advantages.whitening import whiten


def reinforce_pp_baseline(inputs: AdvantageInputs) -> AdvantageResult:
    """Whitened difference to the group's mean; 0 for a group of one and for a flat group."""
    scores = group_scores(inputs)
    white_N = whiten(to_tokens(scores.centred_S, inputs), inputs.mask_N)
    advantages_N = white_N.masked_fill(~scores.signal_S[inputs.session_N], 0.0)
    return AdvantageResult(advantages_N, stats=scores.stats)
