"""How a batch is cut: fair shares of real rows, whatever the padding."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import RecipeError
from practicum.learning.minibatches import Cut, assign_ranks, spare_padding, spread

Row = tuple[int, int]
"""Prompt and session of a real row."""
PADDING: Row = (-1, 0)

row_lists = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=40)
cuts = st.builds(Cut, st.integers(1, 9)) | st.builds(Cut, rows=st.integers(1, 12))


def cut_up(rows: list[Row], cut: Cut, *, epoch: int = 0, whole: bool = False, ranks: int = 1):
    prompts, sessions = zip(*rows, strict=True) if rows else ((), ())
    padding = [row == PADDING for row in rows]
    options = {"seed": 3, "step": 5, "epoch": epoch, "whole_sessions": whole, "ranks": ranks}
    return spread(prompts, sessions, padding, cut, **options)


def homes(rows: list[Row], minibatches, length: int) -> Counter[Row]:
    """Mini-batches in which each session (length 2) or prompt (length 1) has rows."""
    return Counter(key for mb in minibatches for key in {rows[i][:length] for i in mb.real})


@pytest.mark.parametrize(
    ("cut", "real", "steps"),
    [
        (Cut(), 5, 1),
        (Cut(4), 5, 4),
        (Cut(4), 3, 3),
        (Cut(4), 0, 0),
        (Cut(rows=256), 1030, 5),
        (Cut(rows=256), 256, 1),
        (Cut(rows=256), 1, 1),
        (Cut(rows=256), 0, 0),
    ],
)
def test_steps_that_have_real_rows(cut, real, steps):
    assert cut.steps(real) == steps


def test_rows_that_ranks_cannot_share_evenly_are_an_error_naming_the_key():
    with pytest.raises(RecipeError) as error:
        Cut(rows=100).multiple(8)
    assert error.value.path == "train.minibatch_size"


@given(row_lists, cuts, st.booleans())
def test_every_real_row_is_in_one_minibatch_and_none_is_empty(rows, cut, whole):
    minibatches = cut_up(rows, cut, whole=whole)
    assert sorted(i for mb in minibatches for i in mb.real) == list(range(len(rows)))
    assert all(mb.real for mb in minibatches)
    assert all(mb.real == sorted(mb.real) for mb in minibatches)


@given(row_lists, cuts)
def test_real_rows_differ_by_at_most_one(rows, cut):
    counts = [len(mb.real) for mb in cut_up(rows, cut)]
    assert len(counts) == cut.steps(len(rows))
    assert max(counts) - min(counts) <= 1
    assert cut.rows is None or max(counts) <= cut.rows


@given(row_lists, cuts)
def test_whole_sessions_are_never_cut_and_add_at_most_the_largest(rows, cut):
    minibatches = cut_up(rows, cut, whole=True)
    assert set(homes(rows, minibatches, 2).values()) == {1}
    counts = [len(mb.real) for mb in minibatches]
    steps = min(cut.steps(len(rows)), len(set(rows)))
    assert max(counts) <= ceil(len(rows) / steps) + max(Counter(rows).values())
    assert len(counts) <= steps


@given(row_lists, cuts, st.booleans(), st.data())
def test_real_rows_do_not_depend_on_padding(rows, cut, whole, data):
    padded: list[Row] = list(rows)
    for _ in range(data.draw(st.integers(0, 30))):
        padded.insert(data.draw(st.integers(0, len(padded))), PADDING)
    place = [i for i, row in enumerate(padded) if row != PADDING]
    plain = cut_up(rows, cut, whole=whole)
    found = cut_up(padded, cut, whole=whole)
    assert [mb.real for mb in found] == [[place[i] for i in mb.real] for mb in plain]
    assert not any(mb.padding for mb in plain)
    used = [i for mb in found for i in mb.padding]
    assert len(set(used)) == len(used)
    assert all(padded[i] == PADDING for i in used)


@given(row_lists, cuts, st.integers(1, 4))
def test_padding_to_the_multiple_makes_all_minibatches_equally_large(rows, cut, ranks):
    if cut.rows is not None:
        cut = Cut(rows=cut.rows * ranks)
    padded = rows + [PADDING] * (-len(rows) % cut.multiple(ranks))
    minibatches = cut_up(padded, cut, ranks=ranks)
    size = len(padded) // cut.parts if cut.rows is None else cut.rows
    assert {len(mb.rows) for mb in minibatches} == {size}
    assert size % ranks == 0
    if cut.rows is not None or len(rows) >= cut.parts:
        assert len(minibatches) * size == len(padded)


@given(row_lists, cuts, st.integers(1, 4))
def test_whole_sessions_are_levelled_by_spare_padding(rows, cut, ranks):
    if cut.rows is not None:
        cut = Cut(rows=cut.rows * ranks)
    spare = spare_padding(max(Counter(rows).values()), cut.steps(len(rows)), ranks)
    count = spare + -(len(rows) + spare) % cut.multiple(ranks)
    padded = rows + [PADDING] * count
    minibatches = cut_up(padded, cut, whole=True, ranks=ranks)
    sizes = {len(mb.rows) for mb in minibatches}
    assert len(sizes) == 1
    assert sizes.pop() % ranks == 0
    for mb, parts in zip(
        minibatches, assign_ranks(minibatches, [7] * len(padded), ranks, padded), strict=True
    ):
        assert sorted(row for part in parts for row in part) == sorted(mb.rows)
        assert {len(part) for part in parts} == {len(mb.rows) // ranks}
        homes = {(padded[row], rank) for rank, part in enumerate(parts) for row in part if row in mb.real}
        assert len(homes) == len({padded[row] for row in mb.real}), "a session is on one rank"


@given(row_lists, st.integers(0, 30))
def test_one_part_is_all_rows_in_their_order(rows, count):
    (minibatch,) = cut_up(rows + [PADDING] * count, Cut())
    assert minibatch.real == list(range(len(rows)))
    assert len(minibatch.rows) == len(rows) + count


def test_padding_alone_is_never_an_optimizer_step():
    assert cut_up([PADDING] * 6, Cut(3)) == []
    assert cut_up([], Cut(rows=2)) == []
    (first, second) = cut_up([(0, 0), (1, 0), *[PADDING] * 6], Cut(4))
    assert (len(first.rows), len(second.rows)) == (2, 2)


@given(row_lists, cuts)
def test_at_most_one_session_is_cut_at_each_boundary(rows, cut):
    minibatches = cut_up(rows, cut)
    assert sum(n - 1 for n in homes(rows, minibatches, 2).values()) <= max(len(minibatches) - 1, 0)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_groups_stay_whole_where_counts_allow_it(groups, size, parts):
    rows = [(prompt, row) for prompt in range(groups * parts) for row in range(size)]
    assert set(homes(rows, cut_up(rows, Cut(parts)), 1).values()) == {1}


def test_the_shuffle_follows_seed_step_and_epoch():
    rows = [(prompt, 0) for prompt in range(40)]
    first = cut_up(rows, Cut(4))
    assert first == cut_up(rows, Cut(4))
    assert first != cut_up(rows, Cut(4), epoch=1)
    assert first[0].real != list(range(10))
