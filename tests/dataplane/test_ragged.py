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
    assert left.dtype == right.dtype
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


@laws
@given(SHAPES, st.data())
def test_rows_that_lie_one_after_the_other_are_joined_without_a_copy(
    shape: Shape, data: st.DataObject
) -> None:
    # Starting behind the storage's begin, as a column fetched as part of a larger one does.
    values = torch.cat([torch.cat(make_rows(shape))] * 2)
    lengths = shape[0] * 2
    first = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(first + 1, len(lengths)))
    ragged = Ragged.from_rows(values.split(lengths)[first:stop])
    begin, end = sum(lengths[:first]), sum(lengths[:stop])
    assert torch.equal(ragged.values, values[begin:end])
    assert ragged.values.shape == values[begin:end].shape
    assert ragged.values.data_ptr() == values[begin:end].data_ptr()


def test_rows_that_lie_apart_are_copied_together() -> None:
    values = torch.arange(10)
    a, b, c = values[:3], values[3:6], values[6:]
    for rows in ([b, a], [a, c], [a, a], [a, b.clone()], [a, torch.arange(3, 6), c]):
        assert torch.equal(Ragged.from_rows(rows).values, torch.cat(rows))


def test_rows_with_strides_are_copied_together() -> None:
    values = torch.arange(12)
    every_other = [values[0:4:2], values[4:8:2]]
    assert Ragged.from_rows(every_other).values.tolist() == [0, 2, 4, 6]
    # Each row begins where the one before it would end if it had no gaps.
    interleaved = [values[0:4:2], values[2:6:2]]
    assert Ragged.from_rows(interleaved).values.tolist() == [0, 2, 2, 4]
    # Rows of one value count as contiguous whatever their stride says.
    singles = [values[0:2:2], values[1:3:2], values[2:4:2]]
    assert Ragged.from_rows(singles).values.tolist() == [0, 1, 2]
    columns = values.view(4, 3).t()
    assert torch.equal(Ragged.from_rows([columns[:1], columns[1:]]).values, columns)


def test_neighbours_in_memory_of_two_storages_are_copied_together() -> None:
    memory = bytearray(range(8))
    rows = [torch.frombuffer(memory, dtype=torch.uint8, count=4, offset=at) for at in (0, 4)]
    assert rows[0].data_ptr() + 4 == rows[1].data_ptr()
    assert Ragged.from_rows(rows).values.tolist() == list(range(8))


def test_gradients_flow_through_joined_rows() -> None:
    leaf = torch.arange(4.0, requires_grad=True)
    rows = [leaf[:1], leaf[1:3], leaf[3:]]
    (Ragged.from_rows(rows).values * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1, 2, 3, 4]


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
