"""Which rows share a forward pass, and how they lie in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning.packing import RowSpans, plan_microbatches

rows_strategy = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=30
)
"""Prompt, response length, session of each row; prompt p has p + 1 tokens."""


def tokens(rows, part):
    prompts = {rows[i][0] for i in part}
    return sum(p + 1 for p in prompts) + sum(rows[i][1] - 1 for i in part)


def plan(rows, budget, *, sessions=False):
    names, lengths, numbers = zip(*rows, strict=True)
    prompt_lengths = [p + 1 for p in names]
    return plan_microbatches(names, prompt_lengths, lengths, budget, numbers if sessions else None)


@given(rows_strategy, st.integers(1, 60), st.booleans())
def test_every_row_with_tokens_is_in_one_microbatch_within_the_budget(rows, budget, sessions):
    parts = plan(rows, budget, sessions=sessions)
    assert sorted(i for part in parts for i in part) == [i for i, row in enumerate(rows) if row[1]]
    for part in parts:
        units = {rows[i][2] if sessions else i for i in part}
        assert tokens(rows, part) <= budget or len(units) == 1
    assert parts == plan(rows, budget, sessions=sessions)


@given(rows_strategy, st.integers(1, 60))
def test_sessions_are_not_torn_apart(rows, budget):
    parts = plan(rows, budget, sessions=True)
    homes = [{rows[i][2] for i in part} for part in parts]
    assert sum(map(len, homes)) == len(set().union(*homes))


@given(rows_strategy, st.integers(1, 60))
def test_groups_that_fit_the_budget_stay_whole(rows, budget):
    parts = plan(rows, budget)
    for prompt in {row[0] for row in rows}:
        group = [i for i, row in enumerate(rows) if row[0] == prompt and row[1]]
        if tokens(rows, group) <= budget:
            assert sum(any(i in part for i in group) for part in parts) <= 1


def test_a_group_too_large_for_the_budget_is_cut_and_repeats_its_prompt():
    assert plan([(4, 6, 0), (4, 6, 0), (4, 6, 0)], 15) == [[0, 1], [2]]


def test_rows_longer_than_the_budget_go_alone():
    assert plan([(0, 3, 0), (1, 50, 0), (2, 3, 0)], 10) == [[1], [2, 0]]


def ragged(*rows):
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])


def test_rows_with_equal_prompts_share_it_and_positions_restart_after_it():
    rows = RowSpans(ragged([1, 2, 3], [4], [1, 2, 3]), ragged([5, 6], [7], [8, 9, 10]))
    packed = rows.pack([0, 1, 2])
    assert packed.ids_N.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert packed.positions_N.tolist() == [0, 1, 2, 0, 3, 3, 4]
    assert packed.target_M.tolist() == [5, 6, 7, 8, 9, 10]
    assert packed.gather_M.tolist() == [2, 4, 3, 2, 5, 6]
    assert packed.column_M.tolist() == [0, 1, 2, 3, 4, 5]


def test_only_sampled_tokens_are_predicted_and_rows_without_any_are_left_out():
    rows = RowSpans(ragged([1], [2], [3]), ragged([4, 5, 6], [7, 8], []))
    sampled = torch.tensor([False, True, False, False, False])
    (packed,) = rows.microbatches(100, sampled_M=sampled)
    assert packed.ids_N.tolist() == [1, 4, 5]
    assert packed.target_M.tolist() == [5]
    assert packed.gather_M.tolist() == [1]
    assert packed.column_M.tolist() == [1]


def test_only_the_rows_asked_for_are_packed_and_columns_point_into_the_whole_batch():
    rows = RowSpans(ragged([1], [2], [3]), ragged([4, 5], [6], [7, 8]))
    (packed,) = rows.microbatches(100, rows=[2, 1])
    assert packed.target_M.tolist() == [7, 8, 6]
    assert packed.column_M.tolist() == [3, 4, 2]


def test_nothing_to_predict_gives_no_microbatch():
    rows = RowSpans(ragged([1], [2]), ragged([], []))
    assert list(rows.microbatches(10)) == []


def test_an_empty_prompt_and_uneven_columns_are_errors():
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        RowSpans(ragged([1], []), ragged([4], [5]))
    with pytest.raises(DataError, match="2 prompts came with 1 responses"):
        RowSpans(ragged([1], [2]), ragged([4]))
