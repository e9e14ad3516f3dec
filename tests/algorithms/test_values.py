"""The critic's loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.losses import value_loss

from .batches import law


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


VALUES, OLD, RETURNS = [1.0, 1.0, 0.1], [0.0, 0.0, 0.0], [2.0, -1.0, 1.0]


NUMBERS = st.floats(-2, 2)


@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1), clip=st.none() | st.floats(0.05, 1))
@law
def test_value_loss_follows_its_formula(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    values, old, returns = (tensor(list(column)) for column in zip(*rows, strict=True))
    loss, clipped = value_loss(values, old, returns, clip)
    expected, held = [], []
    for v, v_old, r in rows:
        near = v if clip is None else min(max(v, v_old - clip), v_old + clip)
        expected.append(max((v - r) ** 2, (near - r) ** 2) / 2)
        held.append(float((near - r) ** 2 > (v - r) ** 2))
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert clipped.tolist() == held
