"""Aggregation: weights by hand, against means of means, and over any split into micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.aggregation import AGGREGATIONS, session_count, token_weights
from practicum.algorithms.segments import segment_count

from . import reference
from .batches import Batch, batches, law

KINDS = sorted(AGGREGATIONS)
MASK = torch.tensor([True, True, False, True, True])
SESSION = torch.tensor([0, 2, 2, 2, 2])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4]),
        ("seq_mean_token_sum", [1 / 2, 1 / 2, 0, 1 / 2, 1 / 2]),
        ("seq_mean_token_mean", [1 / 2, 1 / 6, 0, 1 / 6, 1 / 6]),
    ],
)
def test_weights_by_hand(kind: str, expected: list[float]) -> None:
    weights_N = token_weights(kind, MASK, SESSION, sessions=4, dtype=torch.float64)
    assert weights_N.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_sampled_weighs_nothing(kind: str) -> None:
    assert token_weights(kind, torch.zeros_like(MASK), SESSION, 4).tolist() == [0.0] * 5
    assert token_weights(kind, MASK[:0], SESSION[:0], 0).tolist() == []


@given(batch=batches(), data=st.data())
@law
def test_any_split_adds_up_to_the_mean_of_means(batch: Batch, data: st.DataObject) -> None:
    tokens = len(batch.session)
    parts = data.draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens))
    losses = torch.tensor(batch.reward, dtype=torch.float64)
    for kind in KINDS:
        weights_N = token_weights(kind, batch.mask_N, batch.session_N, len(batch.group), torch.float64)
        total = 0.0
        for part in range(3):
            here = torch.tensor(parts, dtype=torch.int64) == part
            total += (weights_N[here] * losses[here]).sum().item()
        expected = reference.aggregated(batch, kind, batch.reward)
        assert total == pytest.approx(expected, rel=1e-12, abs=1e-12), kind


def test_weights_of_cut_sessions_by_hand() -> None:
    # Session 0 is whole; of session 1 two of four sampled tokens are here, of session 2 one of four.
    mask_N = torch.tensor([True, True, False, True, True])
    session_N, whole_S = torch.tensor([0, 1, 1, 1, 2]), torch.tensor([1, 4, 4])
    tokens_S = segment_count(session_N[mask_N], 3)
    assert session_count(tokens_S, whole_S).item() == 1.75
    expected = {
        "token_mean": [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4],
        "seq_mean_token_sum": [1 / 1.75, 1 / 1.75, 0, 1 / 1.75, 1 / 1.75],
        "seq_mean_token_mean": [1 / 1.75, 1 / 7, 0, 1 / 7, 1 / 7],
    }
    for kind, weights in expected.items():
        found_N = token_weights(kind, mask_N, session_N, 3, torch.float64, whole_S=whole_S)
        assert found_N.tolist() == pytest.approx(weights, rel=1e-15), kind


@given(batch=batches(), data=st.data())
@law
def test_minibatches_that_cut_sessions_add_up_to_the_whole_batch(batch: Batch, data: st.DataObject) -> None:
    tokens, sessions = len(batch.session), len(batch.group)
    part_N = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens)))
    mask_N, session_N = batch.mask_N, batch.session_N
    whole_S = segment_count(session_N[mask_N], sessions)
    for kind in KINDS:
        total_N = torch.zeros(tokens, dtype=torch.float64)
        for part in range(3):
            here_N = part_N == part
            mask_P, session_P = mask_N[here_N], session_N[here_N]
            tokens_S = segment_count(session_P[mask_P], sessions)
            by_token = kind == "token_mean"
            scale = tokens_S.sum() if by_token else session_count(tokens_S, whole_S)
            weights_P = token_weights(kind, mask_P, session_P, sessions, torch.float64, whole_S=whole_S)
            total_N[here_N] = weights_P * scale
        scale = whole_S.sum() if kind == "token_mean" else (whole_S > 0).sum()
        expected_N = scale * token_weights(kind, mask_N, session_N, sessions, torch.float64)
        torch.testing.assert_close(total_N, expected_N, rtol=1e-12, atol=1e-12, msg=kind)


@given(batch=batches(), more=st.integers(0, 3))
@law
def test_whole_sessions_weigh_the_same_bit_for_bit_beside_any_number_of_empty_ones(
    batch: Batch, more: int
) -> None:
    mask_N, session_N, sessions = batch.mask_N, batch.session_N, len(batch.group)
    tokens_S = segment_count(session_N[mask_N], sessions)
    divisors = {
        "token_mean": tokens_S.sum().expand_as(tokens_S),
        "seq_mean_token_sum": (tokens_S > 0).sum().expand_as(tokens_S),
        "seq_mean_token_mean": (tokens_S > 0).sum() * tokens_S,
    }
    whole_S = torch.cat([torch.zeros(more, dtype=torch.int64), tokens_S])
    for kind, divisor_S in divisors.items():
        expected_N = (1.0 / divisor_S.clamp(min=1).float())[session_N].masked_fill(~mask_N, 0.0)
        assert torch.equal(token_weights(kind, mask_N, session_N, sessions), expected_N), kind
        shifted_N = token_weights(kind, mask_N, session_N + more, sessions + more, whole_S=whole_S)
        assert torch.equal(shifted_N, expected_N), kind
