"""REINFORCE++: discounted returns of the token rewards, whitened over the batch.

    R_t = r_t + gamma R_{t+1}     over the session's sampled tokens
    A_t = (R_t - mean_batch) / (std_batch + 1e-6)     over the sampled tokens of the batch

Hu et al. 2025, "REINFORCE++: Stabilizing critic-free policy optimization with global advantage
normalization", arXiv:2501.03262.
"""

from __future__ import annotations

from practicum.algorithms.advantages.returns import discounted_returns
from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult
from practicum.algorithms.advantages.whitening import whiten


def reinforce_pp(inputs: AdvantageInputs) -> AdvantageResult:
    """Whitened return of each sampled token; there are no groups, and it always whitens."""
    returns_N = discounted_returns(inputs, inputs.gamma)
    return AdvantageResult(whiten(returns_N, inputs.mask_N))
