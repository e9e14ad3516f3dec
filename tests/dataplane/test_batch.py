"""BatchRef: what is cut and joined is the same, and anything uneven is an error."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.dataplane.batch import BatchRef, compact, expand
from practicum.dataplane.keys import Key, Tags
from practicum.errors import StoreError

from .rows import make_batch


@given(count=st.integers(0, 9), cut=st.integers(0, 9))
def test_cut_then_concat_is_identity(count: int, cut: int) -> None:
    batch = make_batch(count)
    parts = [batch.take(range(min(cut, count))), batch.take(range(min(cut, count), count))]
    assert BatchRef.concat(parts) == batch


@given(count=st.integers(0, 9), wanted=st.sets(st.integers(0, 8)))
def test_where_keeps_order_and_splits_without_loss(count: int, wanted: set[int]) -> None:
    batch = make_batch(count)
    chosen = batch.where(lambda key, tags: key.prompt in wanted)
    rest = batch.where(lambda key, tags: key.prompt not in wanted)
    assert [key.prompt for key in chosen.keys] == sorted(wanted & set(range(count)))
    assert set(chosen.keys) | set(rest.keys) == set(batch.keys)
    assert len(chosen) + len(rest) == count


def test_a_row_twice_is_an_error() -> None:
    batch = make_batch(3)
    with pytest.raises(StoreError, match=r"prompt 1/session 1/trajectory 1 .*more than once"):
        batch.take([0, 1, 1])
    with pytest.raises(StoreError, match=r"prompt 2/session 0/trajectory 2 .*more than once"):
        BatchRef.concat([batch, make_batch(3, start=2)])


def test_a_batch_survives_pickling():
    tags = tuple(Tags(prompt_tokens=i, domain="d", reward=0.5 * i, failure=None) for i in range(3))
    batch = BatchRef("train", tuple(Key(i, 1, 2) for i in range(3)), tags)
    again = pickle.loads(pickle.dumps(batch))
    assert again == batch
    assert all(type(key) is Key for key in again.keys)


_VALUES = st.sampled_from([0, 1, True, False, 0.0, -0.0, 1.0, None, "", "a", "0"])


@given(rows=st.lists(st.tuples(_VALUES, _VALUES), max_size=6))
def test_rows_survive_columns_with_their_types_and_signs(rows: list[tuple[object, object]]) -> None:
    again = expand(pickle.loads(pickle.dumps(compact(rows))), len(rows))
    assert [list(map(repr, row)) for row in again] == [list(map(repr, row)) for row in rows]
