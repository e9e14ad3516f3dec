"""BatchRef: what is cut and joined is the same, and anything uneven is an error."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.wire import Rows
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


_VALUES = st.one_of(
    st.sampled_from([0, 1, True, False, 0.0, -0.0, 1.0, math.nan, None, "", "a", "0", 2**40, -129, 2**80]),
    st.fixed_dictionaries({"a": st.sampled_from([0.5, -0.0, 1])}, optional={"b": st.booleans()}),
)
_COLUMN = st.lists(_VALUES, min_size=6, max_size=6)
_EQUAL = st.sampled_from([0, 0.0, "a", {"a": 0.5}]).map(lambda value: [value] * 6)
_ALIKE = st.sampled_from([int, float, str, bool])


@given(columns=st.lists(_COLUMN | _EQUAL, min_size=1, max_size=3), kind=st.none() | _ALIKE)
def test_rows_survive_pickling_with_their_types_and_signs(columns: list[list[Any]], kind: Any) -> None:
    if kind is not None:
        columns = [
            [kind(x) if type(x) in (bool, int, float) and x == x else kind() for x in c] for c in columns
        ]
    rows = Rows(zip(*columns, strict=True))
    again = pickle.loads(pickle.dumps(rows))
    assert type(again) is Rows
    assert list(map(repr, again)) == list(map(repr, rows))


@pytest.mark.parametrize("rows", [[], [(1,)] * 1000, [(i, float(i % 3), str(i % 2)) for i in range(1000)]])
def test_many_rows_take_few_bytes(rows: list[tuple[Any, ...]]) -> None:
    packed = pickle.dumps(Rows(rows))
    assert pickle.loads(packed) == rows
    assert len(packed) < 300 + 2 * len(rows)
