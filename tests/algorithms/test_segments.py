"""Segment operations against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.segments import (
    discounted_sum_ahead,
    sampled_in_session_order,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_std,
    segment_sum,
)

VALUES = torch.tensor([1.0, -2.0, 4.0, 7.0], dtype=torch.float64)
SEGMENT = torch.tensor([2, 0, 2, 2])


def test_segment_statistics_by_hand() -> None:
    assert segment_count(SEGMENT, 4).tolist() == [1, 0, 3, 0]
    assert segment_sum(VALUES, SEGMENT, 4).tolist() == [-2, 0, 12, 0]
    assert segment_mean(VALUES, SEGMENT, 4).tolist() == [-2, 0, 4, 0]
    assert segment_min(VALUES, SEGMENT, 4).tolist() == [-2, 0, 1, 0]
    assert segment_max(VALUES, SEGMENT, 4).tolist() == [-2, 0, 7, 0]
    assert segment_std(VALUES, SEGMENT, 4).tolist() == [0, 0, 3, 0]


def test_sampled_tokens_come_session_by_session_in_time_order() -> None:
    mask = torch.tensor([True, True, False, True, True, True])
    session = torch.tensor([1, 0, 0, 1, 0, 1])
    assert sampled_in_session_order(mask, session).tolist() == [1, 4, 0, 3, 5]


@given(
    runs=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=40), min_size=1, max_size=4),
    discount=st.floats(0, 1),
)
def test_discounted_sum_ahead_is_the_recurrence(runs: list[list[float]], discount: float) -> None:
    expected: list[float] = []
    for run in runs:
        ahead, sums = 0.0, []
        for x in reversed(run):
            ahead = x + discount * ahead
            sums.append(ahead)
        expected += reversed(sums)
    values = torch.tensor([x for run in runs for x in run], dtype=torch.float64)
    segment = torch.tensor([s for s, run in enumerate(runs) for _ in run])
    found = discounted_sum_ahead(values, segment, discount)
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
