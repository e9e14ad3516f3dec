"""ReMax: the return minus the reward of the greedy answer to the same prompt.

    A_t = sum_{t' >= t} r_t' - reward(greedy)     over the session's sampled tokens, undiscounted

Li et al. 2023, "ReMax: A simple, effective, and efficient reinforcement learning method for
aligning large language models", arXiv:2310.10505. With an outcome reward alone, the sum is the
session's score at every token.
"""

from __future__ import annotations

from practicum.algorithms.advantages.groups import to_tokens
from practicum.algorithms.advantages.returns import discounted_returns
from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult


def remax(inputs: AdvantageInputs) -> AdvantageResult:
    """Return of each sampled token minus its prompt's greedy reward (`baseline_S`, needed here)."""
    assert inputs.baseline_S is not None, "remax needs baseline_S, the greedy reward of each prompt"
    baseline_N = to_tokens(inputs.baseline_S, inputs)
    return AdvantageResult(discounted_returns(inputs, gamma=1.0) - baseline_N)
