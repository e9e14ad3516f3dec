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


def spans(rows):
    """Rows whose prompts differ from their first tokens on, with every other response the same."""
    prompts = [[10 + p] * (p + 1) for p, _, _ in rows]
    responses = [[i % 2 and 50 + i] * length for i, (_, length, _) in enumerate(rows)]
    return RowSpans(ragged(*prompts), ragged(*responses))


def tokens(rows, part):
    return len(spans(rows).pack(part).ids_N) if part else 0


def plan(rows, budget, *, sessions=False):
    numbers = [number for _, _, number in rows] if sessions else None
    found, chosen = spans(rows), [i for i, row in enumerate(rows) if row[1]]
    return plan_microbatches(found.tokens, found.prompt_lengths, chosen, budget, numbers)


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
    parts = plan([(4, 6, 0), (4, 6, 0), (4, 6, 0), (4, 6, 0)], 15)
    assert [sorted(part) for part in parts] == [[0, 1, 2], [3]]


def test_rows_longer_than_the_budget_go_alone():
    assert plan([(0, 3, 0), (1, 50, 0), (2, 3, 0)], 10) == [[1], [2, 0]]


def ragged(*rows):
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])


def test_rows_share_equal_beginnings_and_positions_restart_after_them():
    rows = RowSpans(ragged([1, 2, 3], [4], [1, 2, 3], [1, 2]), ragged([5, 6], [7], [8, 9, 10], [3, 8, 9]))
    packed = rows.pack([0, 1, 2, 3])
    assert packed.ids_N.tolist() == [1, 2, 3, 5, 8, 9, 4]
    assert packed.positions_N.tolist() == [0, 1, 2, 3, 3, 4, 0]
    assert packed.layout.segments.lengths.tolist() == [3, 1, 2, 1]
    assert packed.layout.segments.prefixes.tolist() == [-1, 0, 0, -1]
    assert packed.target_M.tolist() == [5, 6, 7, 8, 9, 10, 3, 8, 9]
    assert packed.gather_M.tolist() == [2, 3, 6, 2, 4, 5, 1, 2, 4]
    assert packed.column_M.tolist() == list(range(9))


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
