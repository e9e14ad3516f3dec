"""Policy losses: numbers by hand, slow references, gradients, and laws on ragged batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum.algorithms.aggregation import token_weights
from practicum.algorithms.losses import POLICY_LOSSES, PolicyInputs

from . import reference
from .batches import Batch, batches, law, with_more_masked_tokens, with_sessions_permuted

KINDS = sorted(POLICY_LOSSES)
CLOSE: dict[str, Any] = {"rel": 1e-9, "abs": 1e-10}


def inputs_of(
    ratios: Sequence[float],
    advantages: Sequence[float],
    session: list[int] | None = None,
    old: float = -1.0,
    **more: Any,
) -> PolicyInputs:
    """Sampled tokens with these ratios to an old logprob."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    return PolicyInputs(
        **{
            "logprobs_N": (log_ratio + old).requires_grad_(),
            "old_logprobs_N": torch.full_like(log_ratio, old),
            "advantages_N": torch.tensor(advantages, dtype=torch.float64),
            "mask_N": torch.ones(len(ratios), dtype=torch.bool),
            "session_N": torch.tensor(session or list(range(len(ratios)))),
            "clip_low": 0.2,
            "clip_high": 0.28,
            **more,
        }
    )


def gradient(kind: str, inputs: PolicyInputs) -> Tensor:
    (slope_N,) = torch.autograd.grad(POLICY_LOSSES[kind](inputs).loss_N.sum(), inputs.logprobs_N)
    return slope_N


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_what_the_gradient_has_of_the_advantage(kind: str) -> None:
    ratios, advantages = [1.5, 0.5, 0.5, 1.5, 4.0, 1.1], [1.0, 1, -1, -1, -2, 2]
    inputs = inputs_of(ratios, advantages)
    weight_N = POLICY_LOSSES[kind](inputs).weight_N
    assert weight_N is not None
    torch.testing.assert_close(gradient(kind, inputs), -weight_N * inputs.advantages_N)


def test_ppo_clip_by_hand() -> None:
    inputs = inputs_of([1.5, 0.5, 0.5, 1.5, 4.0, 1.1], [1, 1, -1, -1, -2, 2])
    found = POLICY_LOSSES["ppo_clip"](inputs)
    assert found.loss_N.tolist() == pytest.approx([-1.28, -0.5, 0.8, 1.5, 8, -2.2])
    assert found.stats_N["ratio"].tolist() == pytest.approx([1.5, 0.5, 0.5, 1.5, 4, 1.1])
    assert found.stats_N["clipped_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert found.stats_N["clipped_low"].tolist() == [0, 0, 1, 0, 0, 0]
    assert found.stats_N["approx_kl"].tolist() == pytest.approx(
        [r - 1 - math.log(r) for r in (1.5, 0.5, 0.5, 1.5, 4, 1.1)]
    )
    assert gradient("ppo_clip", inputs).tolist() == pytest.approx([0, -0.5, 0, 1.5, 8, -2.2])


def test_cispo_without_a_lower_bound() -> None:
    inputs = inputs_of([0.01], [1], clip_low=1.0)
    found = POLICY_LOSSES["cispo"](inputs)
    assert gradient("cispo", inputs).tolist() == pytest.approx([-0.01])
    assert found.stats_N["clipped_low"].tolist() == [0]


def test_dppo_by_hand() -> None:
    """The probability was 0.368: doubled it has risen by too much, times 0.4 it has fallen by too much."""
    inputs = inputs_of([2.0, 1.7, 0.4, 0.5, 0.4], [2, 1, -1, -1, 1])
    found = POLICY_LOSSES["dppo"](inputs)
    assert found.loss_N.tolist() == pytest.approx([0, -1.7, 0, 0.5, -0.4])
    assert found.stats_N["clipped_high"].tolist() == [1, 0, 0, 0, 0]
    assert found.stats_N["clipped_low"].tolist() == [0, 0, 1, 0, 0]
    assert gradient("dppo", inputs).tolist() == pytest.approx([0, -1.7, 0, 0.5, -0.4])


def test_dppo_lets_unlikely_tokens_move_by_any_ratio() -> None:
    inputs = inputs_of([50.0], [1.0], old=math.log(1e-4))
    assert gradient("dppo", inputs).tolist() == pytest.approx([-50])
    assert gradient("ppo_clip", inputs).tolist() == [0]


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
def test_a_ratio_beyond_floats_is_harmless_where_the_clip_discards_it(kind: str) -> None:
    inputs = inputs_of([1.0, 1.0], [1, 0])
    inputs = replace(inputs, old_logprobs_N=inputs.old_logprobs_N - 2000.0)
    assert POLICY_LOSSES[kind](inputs).loss_N.isfinite().all()
    assert gradient(kind, inputs).tolist() == pytest.approx([-1.28 * (kind == "cispo"), 0])


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_gradient_against_finite_differences(kind: str) -> None:
    ratios, advantages = [1.5, 0.5, 0.5, 1.5, 4.0, 1.1], [1, 1, -1, -1, -2, 2]
    inputs = inputs_of(ratios, advantages)
    assert torch.autograd.gradcheck(
        lambda x: POLICY_LOSSES[kind](replace(inputs, logprobs_N=x)).loss_N, inputs.logprobs_N
    )


def test_gspo_s_token_form_has_the_gradient_of_the_sequence_objective() -> None:
    """With one advantage per session, finite differences of its value see the sequence ratio."""
    session = [0, 1, 0, 1, 1, 2, 2, 3]
    inputs = inputs_of(
        [1.2, 0.9, 0.9, 1.3, 0.8, 2.0, 3.0, 0.3],
        [[1.5, -0.5, 1.0, -2.0][s] for s in session],
        session=session,
    )
    weights_N = token_weights("seq_mean_token_mean", inputs.mask_N, inputs.session_N, 4, torch.float64)

    def loss(logprobs_N: Tensor) -> Tensor:
        terms = POLICY_LOSSES["gspo"](replace(inputs, logprobs_N=logprobs_N))
        return (weights_N * terms.loss_N).sum()

    assert torch.autograd.gradcheck(loss, inputs.logprobs_N)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_fine(kind: str) -> None:
    inputs = Batch([], [], [], [], [], [], [], group=[], baseline=[]).policy_inputs()
    assert POLICY_LOSSES[kind](inputs).loss_N.tolist() == []


def test_statistics_carry_no_gradient() -> None:
    for kind in KINDS:
        stats_N = POLICY_LOSSES[kind](inputs_of([1.5, 0.5], [1, -1])).stats_N
        assert stats_N
        assert not any(x_N.requires_grad for x_N in stats_N.values())


@given(batch=batches(), clip_low=st.floats(0.05, 1.2), clip_high=st.floats(0.05, 2.0))
@law
def test_losses_and_gradients_follow_their_formulas(batch: Batch, clip_low: float, clip_high: float) -> None:
    for kind in KINDS:
        inputs = batch.policy_inputs(clip_low, clip_high)
        found = POLICY_LOSSES[kind](inputs)
        loss, slope = reference.policy(batch, kind, clip_low, clip_high)
        assert found.loss_N.tolist() == pytest.approx(loss, **CLOSE), kind
        assert gradient(kind, inputs).tolist() == pytest.approx(slope, **CLOSE), kind


@given(batch=batches())
@law
def test_masked_tokens_have_no_loss_gradient_or_statistic(batch: Batch) -> None:
    for kind in KINDS:
        inputs = batch.policy_inputs()
        found, masked = POLICY_LOSSES[kind](inputs), ~inputs.mask_N
        for x_N in (found.loss_N, gradient(kind, inputs), *found.stats_N.values()):
            assert (x_N[masked] == 0).all(), kind
            assert x_N.isfinite().all(), kind


@given(data=st.data(), batch=batches())
@law
def test_more_masked_tokens_change_not_one_bit(data: st.DataObject, batch: Batch) -> None:
    more, kept = data.draw(with_more_masked_tokens(batch))
    for kind in KINDS:
        before, after = batch.policy_inputs(), more.policy_inputs()
        loss_N = POLICY_LOSSES[kind](before).loss_N
        assert torch.equal(POLICY_LOSSES[kind](after).loss_N[kept], loss_N), kind
        assert torch.equal(gradient(kind, after)[kept], gradient(kind, before)), kind


@given(data=st.data(), batch=batches())
@law
def test_the_order_of_sessions_does_not_matter(data: st.DataObject, batch: Batch) -> None:
    moved, order = data.draw(with_sessions_permuted(batch))
    for kind in KINDS:
        loss_N = POLICY_LOSSES[kind](batch.policy_inputs()).loss_N
        assert torch.equal(POLICY_LOSSES[kind](moved.policy_inputs()).loss_N, loss_N[order]), kind


@given(batch=batches(), clip_range=st.floats(0, 0.5))
@law
def test_on_policy_the_gradient_is_that_of_reinforce(batch: Batch, clip_range: float) -> None:
    inputs = replace(batch, old=batch.logprob).policy_inputs(clip_range, clip_range)
    for kind in ("ppo_clip", "gspo", "cispo"):
        assert torch.equal(gradient(kind, inputs), gradient("reinforce", inputs)), kind
        ratio_N = POLICY_LOSSES[kind](inputs).stats_N["ratio"]
        assert torch.equal(ratio_N, inputs.mask_N.to(ratio_N.dtype)), kind
