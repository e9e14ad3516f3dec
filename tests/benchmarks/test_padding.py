from __future__ import annotations

import pytest
from benchmarks.balance import Shape, least_imbalance, measure
from benchmarks.harness import Measured
from benchmarks.padding_cost import BARE, PADDED, check_same
from benchmarks.report_sessions import added_share
from hypothesis import given
from hypothesis import strategies as st

from practicum.learning.balance import assign_ranks, step_imbalance
from practicum.learning.minibatches import Minibatch


def step(padding_rows: int, **other: float) -> Measured:
    return {"tokens": 9.0, "mean_reward": 0.5, "gradient": 1.25, "padding_rows": padding_rows} | other


def test_steps_that_learnt_something_else_give_no_result() -> None:
    check_same({PADDED: [step(3)], BARE: [step(0)]})
    with pytest.raises(ValueError, match="gradient"):
        check_same({PADDED: [step(3)], BARE: [step(0, gradient=1.2500001)]})


@pytest.mark.parametrize(("padded", "bare"), [(0, 0), (3, 3)])
def test_steps_that_do_not_differ_in_padding_give_no_result(padded: int, bare: int) -> None:
    with pytest.raises(ValueError, match="padding rows"):
        check_same({PADDED: [step(padded)], BARE: [step(bare)]})


def test_padding_adds_its_stage_and_what_clearing_it_takes() -> None:
    padded: list[Measured] = [{"pad": 0.03, "clear": 0.03, "seconds": 5.0}]
    bare: list[Measured] = [{"pad": 0.0, "clear": 0.02, "seconds": 4.0}]
    assert added_share(padded, bare) == pytest.approx(0.01)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_no_assignment_gets_below_the_least_imbalance(ranks: int, each: int, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(1, 500), min_size=ranks * each, max_size=ranks * each))
    minibatches = [Minibatch(list(range(len(tokens))))]
    found = step_imbalance(tokens, assign_ranks(minibatches, tokens, ranks))
    assert found is not None
    assert found >= least_imbalance(minibatches, tokens, ranks) * (1 - 1e-12)


def test_the_least_imbalance_is_that_of_the_longest_row_or_even() -> None:
    assert least_imbalance([Minibatch([0, 1, 2, 3])], [90, 10, 10, 10], 2) == 90 / 60
    assert least_imbalance([Minibatch([0, 1, 2, 3])], [30, 10, 10, 10], 2) == 1


def test_a_shape_is_told_before_and_after() -> None:
    found = measure(Shape(rows=103, minibatch=32, ranks=4), rounds=1)
    assert found["steps"] == 4
    assert found["least"] <= found["after"] < found["before"]
