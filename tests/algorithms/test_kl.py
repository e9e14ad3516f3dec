"""KL estimators and the controllers of their weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from practicum.algorithms.kl import KL_ESTIMATORS, KlWeight, token_kl
from practicum.errors import PracticumError

from .batches import Batch, batches, law

KINDS = sorted(KL_ESTIMATORS)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slow(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(kind: str) -> None:
    student, ref = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.2, 0.6])
    exact = (student * (student / ref).log()).sum().item()
    found = token_kl(kind, student.log(), ref.log(), torch.ones(3, dtype=torch.bool))
    assert (student * found).sum().item() == pytest.approx(exact)


def test_the_gradient_of_k2_is_that_of_the_kl_on_policy() -> None:
    logits, ref = tensor([0.3, -0.2, 1.0]).requires_grad_(), tensor([0.2, 0.2, 0.6])
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref.log())).sum()
    k2 = token_kl("k2", logprobs, ref.log(), torch.ones(3, dtype=torch.bool))
    sampled = (logprobs.detach().exp() * k2).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(sampled, logits)
    assert found.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_against_finite_differences(kind: str) -> None:
    student = tensor([-0.1, -2.0, -0.7, -5.0]).requires_grad_()
    ref, mask = tensor([-0.4, -1.0, -0.2, -0.1]), torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda x: token_kl(kind, x, ref, mask), student)


@given(batch=batches())
@law
def test_estimators_follow_their_formulas(batch: Batch) -> None:
    log_ratios = [new - old for new, old in zip(batch.logprob, batch.old, strict=True)]
    for kind in KINDS:
        student = batch.floats("logprob").requires_grad_()
        found = token_kl(kind, student, batch.floats("old"), batch.mask_N)
        expected = [slow(kind, d) if mask else 0.0 for mask, d in zip(batch.mask, log_ratios, strict=True)]
        assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12), kind
        (slope,) = torch.autograd.grad(found.sum(), student)
        assert slope.isfinite().all(), kind
        assert (slope[~batch.mask_N] == 0).all(), kind


@pytest.mark.parametrize(
    ("observed", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (5.7, 0.995), (60.0, 1.02), (-3.0, 0.98), (math.inf, 1.02)],
)
def test_the_adaptive_weight_by_hand(observed: float, factor: float) -> None:
    controller = KlWeight(coefficient=0.2, target=6.0, horizon=1000)
    controller.update(observed, 100)
    assert controller.coefficient == pytest.approx(0.2 * factor)


def test_the_adaptive_weight_settles_where_the_kl_meets_its_target() -> None:
    controller = KlWeight(coefficient=0.05, target=2.0, horizon=1000)
    for _ in range(500):
        controller.update(1.0 / controller.coefficient, 100)
    assert controller.coefficient == pytest.approx(0.5, rel=1e-6)


def test_a_resumed_adaptive_weight_goes_on_as_if_never_stopped() -> None:
    first, second = KlWeight(0.1, 6.0, 1000), KlWeight(0.1, 6.0, 1000)
    first.update(9.0, 64)
    second.load_state_dict(first.state_dict())
    first.update(3.0, 64)
    second.update(3.0, 64)
    assert second.coefficient == first.coefficient != 0.1


def test_a_state_of_the_other_kind_is_refused() -> None:
    fixed, adaptive = KlWeight(0.1, None, 1000), KlWeight(0.1, 6.0, 1000)
    for one, other in ((fixed, adaptive), (adaptive, fixed)):
        with pytest.raises(PracticumError, match=r"algorithm\.kl"):
            one.load_state_dict(other.state_dict())


def test_the_adaptive_weight_refuses_what_would_ruin_it() -> None:
    controller = KlWeight(0.1, 6.0, horizon=10)
    for observed, sessions in ((3.0, 64), (math.nan, 1)):
        with pytest.raises(PracticumError):
            controller.update(observed, sessions)
    assert controller.coefficient == 0.1
