"""Exponentials of log-ratios: exact where they can be, finite everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.kl import finite_exp, finite_expm1, k3
from practicum.algorithms.losses import POLICY_LOSSES, PolicyInputs

from .batches import law

PAIRS = [(finite_exp, torch.exp), (finite_expm1, torch.expm1)]


@given(x=st.floats(-1000, 66, width=32), pair=st.sampled_from(PAIRS))
@law
def test_up_to_the_limit_value_and_gradient_are_the_same_bits(x, pair):
    found = []
    for function in pair:
        leaf = torch.tensor([x], requires_grad=True)
        value = function(leaf)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@given(
    x=st.floats(67, 10_000, width=32), function=st.sampled_from([finite_exp, finite_expm1, lambda x: k3(-x)])
)
@law
def test_beyond_the_limit_they_are_finite_and_still_grow(x, function):
    leaf = torch.tensor([66.0, x, 2 * x], requires_grad=True)
    value = function(leaf)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert (value.diff() > 0).all()
    assert (slope > 0).all()


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_far_from_the_old_policy_leaves_loss_gradient_and_metrics_finite(loss, advantage):
    logprobs = torch.tensor([-1.0, -300.0, -1.0], requires_grad=True)
    terms = POLICY_LOSSES[loss](
        PolicyInputs(
            logprobs_N=logprobs,
            old_logprobs_N=torch.tensor([-200.0, -1.0, -1.0]),
            advantages_N=torch.full((3,), advantage),
            mask_N=torch.ones(3, dtype=torch.bool),
            session_N=torch.tensor([0, 1, 2]),
            clip_low=0.2,
            clip_high=0.2,
        )
    )
    (gradient,) = torch.autograd.grad(terms.loss_N.sum(), logprobs)
    for numbers in (terms.loss_N, gradient, *terms.stats_N.values()):
        assert numbers.isfinite().all()
