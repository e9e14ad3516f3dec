"""KL estimators and the controllers of their weight."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.kl import KL_ESTIMATORS, AdaptiveKl, FixedKl, KlController, token_kl
from practicum.errors import PracticumError
from practicum.recipe.schema.algorithm_sections import Kl
from practicum.recipe.text.type_text import choices

from .batches import Batch, batches, law

KINDS = sorted(KL_ESTIMATORS)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slow(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def test_estimators_are_the_recipe_s() -> None:
    assert set(KL_ESTIMATORS) == set(choices(Kl.model_fields["estimator"].annotation))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [math.log(2), -math.log(4), 0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(4) ** 2 / 2, 0]),
        ("k3", [0.5 - 1 + math.log(2), 4 - 1 - math.log(4), 0]),
    ],
)
def test_estimators_by_hand(kind: str, expected: list[float]) -> None:
    student, ref = tensor([0.5, 0.1, 0.3]).log(), tensor([0.25, 0.4, 0.9]).log()
    found = token_kl(kind, student, ref, torch.tensor([True, True, False]))
    assert found.kl_N.tolist() == pytest.approx(expected)
    assert found.clamped_N.tolist() == [False] * 3


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(kind: str) -> None:
    student, ref = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.2, 0.6])
    exact = (student * (student / ref).log()).sum().item()
    found = token_kl(kind, student.log(), ref.log(), torch.ones(3, dtype=torch.bool))
    assert (student * found.kl_N).sum().item() == pytest.approx(exact)


def test_the_gradient_of_k2_is_that_of_the_kl_on_policy() -> None:
    logits, ref = tensor([0.3, -0.2, 1.0]).requires_grad_(), tensor([0.2, 0.2, 0.6])
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref.log())).sum()
    k2 = token_kl("k2", logprobs, ref.log(), torch.ones(3, dtype=torch.bool)).kl_N
    sampled = (logprobs.detach().exp() * k2).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(sampled, logits)
    assert found.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_clamp_is_counted_and_stops_the_gradient(kind: str) -> None:
    student = tensor([0.0, 0.0, 0.0]).requires_grad_()
    mask = torch.tensor([True, True, False])
    found = token_kl(kind, student, tensor([5.0, 0.5, -9.0]), mask, clamp=2.0)
    assert found.kl_N.tolist() == pytest.approx([slow(kind, -2.0), slow(kind, -0.5), 0])
    assert found.clamped_N.tolist() == [True, False, False]
    (slope,) = torch.autograd.grad(found.kl_N.sum(), student)
    assert slope[0] == 0
    assert slope[1] != 0
    assert slope[2] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_against_finite_differences(kind: str) -> None:
    student = tensor([-0.1, -2.0, -0.7, -5.0]).requires_grad_()
    ref, mask = tensor([-0.4, -1.0, -0.2, -0.1]), torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda x: token_kl(kind, x, ref, mask, 4.0).kl_N, student)


@given(batch=batches(), clamp=st.none() | st.floats(0.1, 2))
@law
def test_estimators_follow_their_formulas(batch: Batch, clamp: float | None) -> None:
    log_ratios = [new - old for new, old in zip(batch.logprob, batch.old, strict=True)]
    limit = math.inf if clamp is None else clamp
    for kind in KINDS:
        student = batch.floats("logprob").requires_grad_()
        found = token_kl(kind, student, batch.floats("old"), batch.mask_N, clamp)
        bites, expected = [], []
        for mask, d in zip(batch.mask, log_ratios, strict=True):
            bites.append(mask and abs(d) > limit)
            expected.append(slow(kind, min(max(d, -limit), limit)) if mask else 0.0)
        assert found.kl_N.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12), kind
        assert found.clamped_N.tolist() == bites, kind
        (slope,) = torch.autograd.grad(found.kl_N.sum(), student)
        assert slope.isfinite().all(), kind
        assert (slope[~batch.mask_N] == 0).all(), kind


def test_an_unknown_estimator_names_the_known_ones() -> None:
    with pytest.raises(PracticumError, match=r"'k4'.*k1, k2, k3"):
        token_kl("k4", tensor([0]), tensor([0]), torch.tensor([True]))


@pytest.mark.parametrize(
    ("observed", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (5.7, 0.995), (60.0, 1.02), (-3.0, 0.98), (math.inf, 1.02)],
)
def test_the_adaptive_weight_by_hand(observed: float, factor: float) -> None:
    controller = AdaptiveKl(coefficient=0.2, target=6.0, horizon=1000)
    controller.update(observed, n_steps=100)
    assert controller.coefficient == pytest.approx(0.2 * factor)


def test_the_adaptive_weight_settles_where_the_kl_meets_its_target() -> None:
    controller = AdaptiveKl(coefficient=0.05, target=2.0, horizon=1000)
    for _ in range(500):
        controller.update(observed_kl=1.0 / controller.coefficient, n_steps=100)
    assert controller.coefficient == pytest.approx(0.5, rel=1e-6)


def test_a_resumed_adaptive_weight_goes_on_as_if_never_stopped() -> None:
    first = AdaptiveKl(0.1, 6.0, 1000)
    first.update(9.0, 64)
    second = AdaptiveKl(0.1, 6.0, 1000)
    second.load_state_dict(first.state_dict())
    first.update(3.0, 64)
    second.update(3.0, 64)
    assert second.coefficient == first.coefficient != 0.1


def test_the_fixed_weight_stays() -> None:
    controller: KlController = FixedKl(0.1)
    controller.update(100.0, 64)
    controller.load_state_dict(controller.state_dict())
    assert controller.coefficient == 0.1


def test_a_state_of_the_other_kind_is_refused() -> None:
    fixed, adaptive = FixedKl(0.1), AdaptiveKl(0.1, 6.0, 1000)
    with pytest.raises(PracticumError, match="fixed"):
        fixed.load_state_dict(adaptive.state_dict())
    with pytest.raises(PracticumError, match="adaptive"):
        adaptive.load_state_dict(fixed.state_dict())


def test_the_adaptive_weight_refuses_what_would_ruin_it() -> None:
    controller = AdaptiveKl(0.1, 6.0, horizon=10)
    with pytest.raises(PracticumError, match=r"above 12\.8"):
        controller.update(3.0, n_steps=64)
    with pytest.raises(PracticumError, match="not a number"):
        controller.update(math.nan, n_steps=1)
    assert controller.coefficient == 0.1
