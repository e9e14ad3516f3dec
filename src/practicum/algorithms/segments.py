"""Sums, extrema and scans over packed tensors whose entries belong to numbered segments."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_count(segment_N: Tensor, segments: int) -> Tensor:
    """Number of entries of each segment, int64."""
    return torch.bincount(segment_N, minlength=segments)


def segment_sum(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Sum of each segment, or 0 for an empty one."""
    return values_N.new_zeros(segments).index_add(0, segment_N, values_N)


def segment_mean(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Mean of each segment, or 0 for an empty one."""
    count = segment_count(segment_N, segments).clamp(min=1)
    return segment_sum(values_N, segment_N, segments) / count


def segment_std(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Unbiased standard deviation of each segment, or 0 with fewer than two entries."""
    centred_N = values_N - segment_mean(values_N, segment_N, segments)[segment_N]
    freedom = (segment_count(segment_N, segments) - 1).clamp(min=1)
    return (segment_sum(centred_N.square(), segment_N, segments) / freedom).sqrt()


def segment_min(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    start = values_N.new_zeros(segments)
    return start.scatter_reduce(0, segment_N, values_N, "amin", include_self=False)


def segment_max(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    start = values_N.new_zeros(segments)
    return start.scatter_reduce(0, segment_N, values_N, "amax", include_self=False)


def sampled_in_session_order(mask_N: Tensor, session_N: Tensor) -> Tensor:
    """Positions of the sampled tokens, session after session, each session in time order: [M]."""
    sampled_M = mask_N.nonzero().squeeze(1)
    return sampled_M[torch.argsort(session_N[sampled_M], stable=True)]


def next_in_segment(values_M: Tensor, segment_M: Tensor, ahead: int = 1) -> Tensor:
    """The entry `ahead` places later in the same segment, 0 where there is none.

    `segment_M` must be sorted, as it is in the order of `sampled_in_session_order`.
    """
    later_M = torch.zeros_like(values_M)
    if ahead < len(values_M):
        same = segment_M[ahead:] == segment_M[:-ahead]
        later_M[:-ahead] = values_M[ahead:].masked_fill(~same, 0.0)
    return later_M


def discounted_sum_ahead(values_M: Tensor, segment_M: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each segment. `segment_M` must be sorted.

    After k rounds y_t holds the next 2^k terms, so log2(longest segment) rounds over all entries
    do.
    """
    longest = int(torch.bincount(segment_M).max()) if len(segment_M) else 0
    total_M, reach = values_M, 1
    while reach < longest:
        total_M = total_M + discount**reach * next_in_segment(total_M, segment_M, reach)
        reach *= 2
    return total_M
