"""The variants that recipes bring as functions, against the formulas of their papers."""

import importlib.util

import pytest
import torch

from practicum.algorithms.losses import PolicyInputs
from practicum.recipe.algorithm_traits import LossTraits
from practicum.recipe.shipped import shipped_recipes


@pytest.fixture(scope="module")
def variants():
    found = importlib.util.spec_from_file_location("variants", shipped_recipes() / "sort" / "variants.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_sapo_is_its_formula_with_its_gradient(variants) -> None:
    torch.manual_seed(0)
    old, advantages = (torch.randn(40, dtype=torch.float64) for _ in range(2))
    logprobs = (old + 0.5 * torch.randn(40, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(40) < 0.7
    session = torch.arange(40) // 8
    terms = variants.sapo(PolicyInputs(logprobs, old, advantages, mask, session, 0.2, 0.2))
    (gradient,) = torch.autograd.grad(terms.loss_N.sum(), logprobs)
    for i in range(40):
        tau = 1.0 if advantages[i] > 0 else 1.05
        ratio = torch.exp(logprobs[i].detach() - old[i])
        gate = 1 / (1 + torch.exp(-tau * (ratio - 1)))
        loss, slope = -gate * 4 / tau * advantages[i], -4 * gate * (1 - gate) * ratio * advantages[i]
        on = float(mask[i])
        assert float(terms.loss_N[i].detach()) == pytest.approx(on * float(loss), rel=1e-12)
        assert float(gradient[i]) == pytest.approx(on * float(slope), rel=1e-12)
        assert float(-terms.weight_N[i] * advantages[i]) == pytest.approx(on * float(slope), rel=1e-12)
    assert variants.sapo.traits == LossTraits(reads=frozenset({"entropy"}))


def test_sapo_is_the_plain_policy_gradient_where_the_policy_sampled(variants) -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -3.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    inputs = PolicyInputs(logprobs, logprobs.detach(), advantages, mask, torch.zeros(2).long(), 0.2, 0.2)
    (gradient,) = torch.autograd.grad(variants.sapo(inputs).loss_N.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
