"""The computed permutation is one, for every size and key."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.tasks.permutation import Permutation


@given(st.integers(1, 700), st.integers(0, 2**40), st.integers(0, 50))
def test_it_is_a_bijection(size, seed, epoch):
    permutation = Permutation(size, (seed, "task", epoch))
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


@given(st.integers(10**9, 10**15), st.integers(0, 2**40), st.data())
def test_huge_ranges_are_reached_at_once_and_without_collisions(size, seed, data):
    some = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    images = {Permutation(size, (seed,))[i] for i in some}
    assert len(images) == len(some)
    assert all(0 <= image < size for image in images)


def test_keys_give_different_orders():
    orders = {tuple(Permutation(20, (0, "t", e))[i] for i in range(20)) for e in range(200)}
    assert len(orders) == 200


def test_every_place_gets_every_value_about_equally_often():
    counts = Counter(Permutation(5, (seed,))[i] * 5 + i for seed in range(5000) for i in range(5))
    assert all(850 < counts[cell] < 1150 for cell in range(25))


@pytest.mark.parametrize("index", [-1, 10])
def test_outside_of_the_range_is_an_error(index):
    with pytest.raises(IndexError, match=r"range\(10\)"):
        Permutation(10, (0,))[index]
