"""Weights against the train/rollout mismatch: numbers by hand, and laws on ragged batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.losses import POLICY_LOSSES
from practicum.algorithms.mismatch import MismatchWeights, mismatch_weights

from .batches import Batch, batches, law, with_more_masked_tokens, with_sessions_permuted

RATIOS = [0.5, 4.0, 1.0, 0.2, 0.8, 2.0]
SESSIONS = [0, 0, 1, 1, 2, 2]
"""Products of the sessions: 2, 0.2 and 1.6."""
MASKED = 3
"""Where a token stands that a tool put in."""


@pytest.mark.parametrize(
    ("ratio", "cap", "weights", "capped"),
    [
        ("token", 1.5, [0.5, 1.5, 1.0, 0.2, 0.8, 1.5], [1, 6]),
        ("sequence", 1.8, [1.8, 1.8, 0.2, 0.2, 1.6, 1.6], [0, 1]),
    ],
)
def test_weights_are_those_computed_by_hand(ratio: Any, cap: float, weights: list, capped: list) -> None:
    rollout = torch.tensor([-3.0, -2.0, -1.0, -4.0, -0.5, -1.5], dtype=torch.float64)
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    insert = lambda x, value: torch.cat([x[:MASKED], x.new_tensor([value]), x[MASKED:]])  # noqa: E731
    found = mismatch_weights(
        insert(rollout + log_ratio, torch.nan),
        insert(rollout, 7.0),
        insert(torch.ones(6), 0.0).bool(),
        insert(torch.tensor(SESSIONS), 1),
        ratio,
        cap,
    )
    expected = [*weights[:MASKED], 0.0, *weights[MASKED:]]
    assert found.weights_N.tolist() == pytest.approx(expected, rel=1e-12)
    stats = {"mismatch_truncated": 2 / 6, "mismatch_weight": sum(weights) / 6}
    assert found.stats == pytest.approx(stats, rel=1e-12)
    assert found.capped_N.nonzero().squeeze(1).tolist() == capped


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_ratios_beyond_any_number_are_bounded(ratio: Any) -> None:
    old, sessions = torch.tensor([-1.0, -1.0, -2000.0, -2000.0]), torch.tensor([0, 0, 1, 1])
    found = mismatch_weights(old, old.flip(0), torch.ones(4, dtype=torch.bool), sessions, ratio, 2.0)
    torch.testing.assert_close(found.weights_N, torch.tensor([2.0, 2.0, 0.0, 0.0]))


def test_nothing_sampled_has_no_weights_and_no_counts() -> None:
    none = torch.zeros(2, dtype=torch.bool)
    found = mismatch_weights(torch.ones(2), torch.ones(2), none, torch.tensor([0, 1]), "sequence", 2.0)
    assert found.weights_N.tolist() == [0.0, 0.0]
    assert found.stats == {}


RULES = st.tuples(st.sampled_from(["token", "sequence"]), st.sampled_from([1.0, 1.3, 2.0, 50.0]))


def weigh(batch: Batch, rules: Any) -> MismatchWeights:
    logprobs = batch.floats("logprob"), batch.floats("old")
    return mismatch_weights(*logprobs, batch.mask_N, batch.session_N, *rules)


@law
@given(batch=batches(), rules=RULES)
def test_engines_that_agree_have_weights_of_exactly_one(batch: Batch, rules: Any) -> None:
    found = weigh(replace(batch, logprob=batch.old), rules)
    assert torch.equal(found.weights_N, batch.mask_N.double())
    assert all(count == (name == "mismatch_weight") for name, count in found.stats.items())


@law
@given(data=st.data(), batch=batches(), rules=RULES)
def test_weights_depend_on_neither_order_nor_masked_tokens(
    data: st.DataObject, batch: Batch, rules: Any
) -> None:
    found = weigh(batch, rules)
    more, places = data.draw(with_more_masked_tokens(batch))
    moved, order = data.draw(with_sessions_permuted(batch))
    for other, here, there in (
        (weigh(more, rules), found.weights_N, places),
        (weigh(moved, rules), found.weights_N[order], slice(None)),
    ):
        torch.testing.assert_close(other.weights_N[there], here, rtol=1e-12, atol=0)
        assert other.stats == pytest.approx(found.stats, rel=1e-12)


@law
@given(batch=batches(), rules=RULES, kind=st.sampled_from(sorted(POLICY_LOSSES)))
def test_a_weighed_advantage_weighs_every_policy_loss(batch: Batch, rules: Any, kind: str) -> None:
    weights_N = weigh(replace(batch, logprob=batch.advantage), rules).weights_N
    assert math.isfinite(float(weights_N.sum()))
    inputs = batch.policy_inputs()
    plain_N = weights_N * POLICY_LOSSES[kind](inputs).loss_N
    weighed = replace(inputs, advantages_N=weights_N * inputs.advantages_N)
    weighed_N = POLICY_LOSSES[kind](weighed).loss_N
    torch.testing.assert_close(weighed_N, plain_N, rtol=1e-12, atol=1e-15)
    slopes = [torch.autograd.grad(x_N.sum(), inputs.logprobs_N)[0] for x_N in (weighed_N, plain_N)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-15)
