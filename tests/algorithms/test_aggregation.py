"""Aggregation: weights by hand, against means of means, and over any split into micro-batches."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.aggregation import AGGREGATIONS, token_weights
from practicum.errors import PracticumError
from practicum.recipe.schema import Algorithm

from . import reference
from .batches import Batch, batches, law

KINDS = sorted(AGGREGATIONS)
MASK = torch.tensor([True, True, False, True, True])
SESSION = torch.tensor([0, 2, 2, 2, 2])


def test_kinds_are_the_recipe_s() -> None:
    assert set(AGGREGATIONS) == set(get_args(Algorithm.model_fields["aggregation"].annotation))


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


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(PracticumError, match=r"'mean'.*token_mean, seq_mean_token_sum"):
        token_weights("mean", MASK, SESSION, 4)


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
