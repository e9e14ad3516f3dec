"""The critic's loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.values import value_loss

from .batches import Batch, batches, law


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


VALUES, OLD, RETURNS = [1.0, 1.0, 0.1, 3.0], [0.0, 0.0, 0.0, 0.0], [2.0, -1.0, 1.0, 9.0]
MASK = torch.tensor([True, True, True, False])


def test_clipped_value_loss_by_hand() -> None:
    values = tensor(VALUES).requires_grad_()
    found = value_loss(values, tensor(OLD), tensor(RETURNS), MASK, clip=0.2)
    # The first moved past the clip towards its return, so it is held at 0.2; the second moved away.
    assert found.loss_N.tolist() == pytest.approx([1.8**2 / 2, 2.0, 0.9**2 / 2, 0])
    assert found.stats_N["value_clipped"].tolist() == [1, 0, 0, 0]
    (slope,) = torch.autograd.grad(found.loss_N.sum(), values)
    assert slope.tolist() == pytest.approx([0, 2, -0.9, 0])


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    found = value_loss(tensor(VALUES), tensor(OLD), tensor(RETURNS), MASK, clip=None)
    assert found.loss_N.tolist() == pytest.approx([0.5, 2, 0.405, 0])
    assert found.stats_N["value_clipped"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_against_finite_differences(clip: float | None) -> None:
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, tensor(OLD), tensor(RETURNS), MASK, clip).loss_N,
        tensor(VALUES).requires_grad_(),
    )


@given(batch=batches(), clip=st.none() | st.floats(0.05, 1))
@law
def test_value_loss_follows_its_formula(batch: Batch, clip: float | None) -> None:
    values, old, target = (batch.floats(name) for name in ("value", "advantage", "reward"))
    values.requires_grad_()
    found = value_loss(values, old, target, batch.mask_N, clip)
    expected, held = [], []
    for mask, v, v_old, r in zip(batch.mask, batch.value, batch.advantage, batch.reward, strict=True):
        near = v if clip is None else min(max(v, v_old - clip), v_old + clip)
        expected.append(max((v - r) ** 2, (near - r) ** 2) / 2 if mask else 0.0)
        held.append(float(mask and (near - r) ** 2 > (v - r) ** 2))
    assert found.loss_N.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.stats_N["value_clipped"].tolist() == held
    assert not found.stats_N["value_clipped"].requires_grad
    (slope,) = torch.autograd.grad(found.loss_N.sum(), values)
    assert slope.isfinite().all()
    assert (slope[~batch.mask_N] == 0).all()
