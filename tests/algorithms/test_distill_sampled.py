"""Divergences of the sampled token's logprob."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum.algorithms.divergences import SAMPLED, sampled_divergence

from .batches import law

KINDS = sorted(SAMPLED)


def value(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d), "mse": d * d}[
        kind.removesuffix("_straight")
    ]


def slope(kind: str, d: float) -> float:
    sign = (d > 0) - (d < 0)
    if kind.endswith("_straight"):
        return d
    return {"k1": 1, "k2": d, "k3": 1 - math.exp(-d), "abs": sign, "mse": 2 * d}[kind]


@given(pairs=st.lists(st.tuples(*[st.floats(-9, 0)] * 2), min_size=1))
@law
def test_values_and_gradients_follow_their_formulas(pairs: list[tuple[float, float]]) -> None:
    student, teacher = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    ratios = [p - q for p, q in pairs]
    for kind in KINDS:
        logprobs = student.clone().requires_grad_()
        found = sampled_divergence(kind, logprobs, teacher)
        (gradient,) = torch.autograd.grad(found.sum(), logprobs)
        expected, slopes = [value(kind, d) for d in ratios], [slope(kind, d) for d in ratios]
        assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9), kind
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-9), kind
        assert kind.startswith("k1") or (found >= 0).all(), kind


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("_straight")])
def test_gradients_against_finite_differences(kind: str) -> None:
    teacher = torch.tensor([-0.4, -1.0, -0.2, -0.1], dtype=torch.float64)
    student = torch.tensor([-0.1, -2.0, -0.7, -5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sampled_divergence(kind, x, teacher), student)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("k2", "reverse"),
        ("k1_straight", "reverse"),
        ("k3_straight", "reverse"),
        ("k3", "forward"),
        ("k1", None),
    ],
)
def test_whose_gradient_it_is_on_average_over_the_student_s_samples(kind: str, target: str | None) -> None:
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    log_p, log_q = logits.log_softmax(0), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    exact = {
        "reverse": (log_p.exp() * (log_p - log_q)).sum(),
        "forward": (log_q.exp() * (log_q - log_p)).sum(),
        None: 0.0 * log_p.sum(),
    }[target]
    found = gradient((log_p.detach().exp() * sampled_divergence(kind, log_p, log_q)).sum())
    torch.testing.assert_close(found, gradient(exact))
