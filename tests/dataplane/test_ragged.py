"""Ragged columns: packed, as rows and as bytes, they are the same column."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from practicum.dataplane.packing import pack
from practicum.dataplane.ragged import Ragged

DTYPES = (torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.bool)
LENGTHS = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda pair: [pair[0]] * pair[1]),
)
SHAPES = st.tuples(LENGTHS, st.sampled_from([(), (1,), (3,), (2, 3), (0,)]), st.sampled_from(DTYPES))
Shape = tuple[list[int], tuple[int, ...], torch.dtype]
laws = settings(max_examples=60)


def make_rows(shape: Shape) -> list[Tensor]:
    """Rows that lie apart in memory, every value another one (as far as the dtype has so many)."""
    lengths, trailing, dtype = shape
    counter = torch.arange(sum(lengths) * torch.Size(trailing).numel())
    values = (counter % 2 if dtype == torch.bool else counter).to(dtype)
    return [row.clone() for row in values.view(sum(lengths), *trailing).split(lengths)]


def assert_same(left: Ragged, right: Ragged) -> None:
    assert left.lengths == right.lengths
    assert left.values.dtype == right.values.dtype
    assert left.trailing == right.trailing
    assert torch.equal(left.values, right.values)
    for one, other in zip(left.rows, right.rows, strict=True):
        assert torch.equal(one, other)


@laws
@given(SHAPES)
def test_a_packed_column_comes_back(shape: Shape) -> None:
    ragged = Ragged.from_rows(make_rows(shape))
    assert_same(pickle.loads(pickle.dumps(pack(ragged))).unpack(), ragged)


@laws
@given(SHAPES)
def test_rows_and_packed_values_are_two_forms_of_one_column(shape: Shape) -> None:
    rows = make_rows(shape)
    from_rows = Ragged.from_rows(rows)
    packed = Ragged.packed(torch.cat(rows), shape[0])
    assert_same(from_rows, packed)
    for row, given_row in zip(packed.rows, rows, strict=True):
        assert torch.equal(row, given_row)


@laws
@given(SHAPES, st.booleans(), st.data())
def test_select_takes_those_rows_in_that_order(shape: Shape, packed: bool, data: st.DataObject) -> None:
    rows = make_rows(shape)
    ragged = Ragged.packed(torch.cat(rows), shape[0]) if packed else Ragged.from_rows(rows)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    assert_same(ragged.select(indices), Ragged.from_rows([rows[i] for i in indices]))


def test_selected_neighbours_stay_packed() -> None:
    values = torch.arange(10)
    selected = Ragged.packed(values, [1, 2, 3, 4]).select([1, 2])
    assert selected.is_packed
    assert selected.values.data_ptr() == values[1:].data_ptr()
    assert selected.values.tolist() == [1, 2, 3, 4, 5]
    assert not Ragged.packed(values, [1, 2, 3, 4]).select([2, 1]).is_packed


def test_a_column_of_no_rows() -> None:
    for ragged in (
        Ragged.from_rows([torch.zeros(2, 3)]).select([]),
        Ragged.packed(torch.zeros(4, 3), [2, 2]).select([]),
    ):
        assert (len(ragged), ragged.rows, ragged.trailing) == (0, [], (3,))


@pytest.mark.parametrize("row", [torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1), torch.tensor(1.0)])
def test_rows_may_differ_in_length_only(row: Tensor) -> None:
    with pytest.raises(ValueError, match="row 1 is"):
        Ragged.from_rows([torch.zeros(2), row])


@pytest.mark.parametrize("lengths", [[2, 2], [3, 3], [6, -1]])
def test_lengths_must_add_up(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="5 packed values"):
        Ragged.packed(torch.zeros(5), lengths)
