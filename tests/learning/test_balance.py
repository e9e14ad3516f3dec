"""Rows over ranks: equally many, with even tokens."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.learning.minibatches import Cut, Minibatch, assign_ranks, partition, spread

token_lists = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(0, 2000), min_size=0, max_size=40).map(lambda t: t[: len(t) // ranks * ranks]),
        st.just(ranks),
    )
)


def long_tailed(rows: int, seed: int) -> list[int]:
    """Lengths as answers have them: most short, a few very long."""
    return [2 + int(n) for n in np.random.default_rng(seed).lognormal(5, 1, rows)]


def sums(tokens, parts):
    return [sum(tokens[i] for i in part) for part in parts]


def best_of_two(tokens) -> int:
    """The least that the larger of two equally long parts can have."""
    halves = combinations(range(len(tokens)), len(tokens) // 2)
    return min(max(s := sum(tokens[i] for i in half), sum(tokens) - s) for half in halves)


@given(token_lists)
def test_every_item_is_on_one_rank_and_ranks_have_equally_many(case):
    tokens, ranks = case
    parts = partition(tokens, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(tokens)))
    assert {len(part) for part in parts} == {len(tokens) // ranks}
    assert parts == partition(tokens, ranks)


@pytest.mark.parametrize("seed", range(20))
def test_two_parts_come_near_the_best_ones(seed):
    tokens = long_tailed(14, seed)
    assert max(sums(tokens, partition(tokens, 2))) <= 1.02 * best_of_two(tokens)


@pytest.mark.parametrize("ranks", [2, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_long_tailed_rows_are_even(ranks, seed):
    tokens = long_tailed(512, seed)
    assert 1 <= max(sums(tokens, partition(tokens, ranks))) * ranks / sum(tokens) < 1.001


def test_a_count_that_ranks_cannot_share_is_an_error():
    with pytest.raises(ValueError, match="7 rows"):
        partition([1] * 7, 2)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 3))
def test_each_minibatch_is_shared_among_all_ranks(real, ranks, parts):
    rows = real + -real % (ranks * parts)
    tokens = long_tailed(real, seed=real) + [2] * (rows - real)
    numbers = list(range(rows))
    cut = Cut(parts)
    is_padding = [row >= real for row in numbers]
    minibatches = spread(numbers, numbers, is_padding, cut, seed=0, step=1, epoch=0, ranks=ranks)
    for minibatch, shards in zip(minibatches, assign_ranks(minibatches, tokens, ranks), strict=True):
        assert sorted(row for shard in shards for row in shard) == sorted(minibatch.rows)
        assert len({len(shard) for shard in shards}) == 1


def test_with_fewer_real_rows_than_ranks_some_have_padding_alone():
    (shards,) = assign_ranks([Minibatch([0, 2], [1, 3])], [50, 2, 60, 2], 4)
    assert sorted(shards) == [[0], [1], [2], [3]]


def test_whole_sessions_are_even_in_tokens_where_rows_allow_it():
    minibatch = Minibatch([0, 1, 2, 3, 4, 5], [6, 7])
    sessions = ["a", "a", "b", "b", "c", "d", "padding", "padding"]
    (shards,) = assign_ranks([minibatch], [50, 50, 30, 30, 20, 20, 2, 2], 2, sessions)
    assert shards == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_whole_sessions_that_ranks_cannot_share_are_an_error():
    with pytest.raises(ValueError, match="4 rows with whole sessions"):
        assign_ranks([Minibatch([0, 1, 2, 3])], [1] * 4, 2, ["a", "a", "a", "b"])


def test_padding_counts_as_the_two_tokens_that_it_has():
    (shards,) = assign_ranks([Minibatch([0, 1], [2, 3])], [10, 20, 999, 0], 2)
    assert sorted(min(shard) for shard in shards) == [0, 1]
