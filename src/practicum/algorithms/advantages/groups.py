"""Scores of sessions within their groups: what the estimators that compare sessions share.

A session without sampled tokens has no score and is in no count. A group left with one session, or
one whose scores are all equal ("flat"), has no relative signal: its centred scores are exactly 0,
free of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from practicum.algorithms.advantages.types import AdvantageInputs
from practicum.algorithms.segments import (
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_std,
    segment_sum,
)


@dataclass(frozen=True)
class GroupScores:
    """Each session's score minus its group's mean, and its group's std, size and signal (bool).

    Statistics: `groups` that have sessions, `groups_of_one`, `flat_groups` (of two sessions or
    more).
    """

    centred_S: Tensor
    std_S: Tensor
    size_S: Tensor
    signal_S: Tensor
    stats: dict[str, float]


def session_scores(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Score of each session, and whether it has sampled tokens (bool)."""
    sessions, mask_N = len(inputs.group_S), inputs.mask_N
    session_M = inputs.session_N[mask_N]
    score_S = segment_sum(inputs.token_rewards_N[mask_N], session_M, sessions)
    return score_S, segment_count(session_M, sessions) > 0


def group_scores(inputs: AdvantageInputs) -> GroupScores:
    """Compares each session's score with those of its group."""
    score_S, live_S = session_scores(inputs)
    group_S = inputs.group_S
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    live = (score_S[live_S], group_S[live_S], groups)
    size_G = segment_count(group_S[live_S], groups)
    equal_G = segment_min(*live) == segment_max(*live)
    signal_S = live_S & ~equal_G[group_S]
    return GroupScores(
        centred_S=(score_S - segment_mean(*live)[group_S]).masked_fill(~signal_S, 0.0),
        std_S=segment_std(*live)[group_S],
        size_S=size_G[group_S],
        signal_S=signal_S,
        stats={
            "groups": float((size_G > 0).sum()),
            "groups_of_one": float((size_G == 1).sum()),
            "flat_groups": float(((size_G > 1) & equal_G).sum()),
        },
    )


def to_tokens(values_S: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Gives each sampled token the value of its session, and masked positions 0."""
    return values_S[inputs.session_N].masked_fill(~inputs.mask_N, 0.0)
