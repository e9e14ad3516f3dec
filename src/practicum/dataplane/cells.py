"""Where a row's value lies in what was put, and how such places become a column again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from practicum.dataplane.check_columns import DTYPES
from practicum.dataplane.fields import Field
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import StoreError

Cell = tuple[Any, int | None]
"""A packed column and the row in it, of which a view is made when it is read; or (value, None)."""


def cells_of(column: Column) -> list[Cell]:
    """A cell for each row. Rows that lie apart are held one by one, so that each can be freed."""
    if isinstance(column, list):
        return [(value, None) for value in column]
    if isinstance(column, Ragged) and not column.is_packed:
        return [(row, None) for row in column.rows]
    return [(column, i) for i in range(len(column))]


def value_of(cell: Cell) -> Any:
    """The row's own value: a tensor, or the object of an object field."""
    source, i = cell
    return source if i is None else source[i]


def gather(field: Field, cells: list[Cell]) -> Column:
    """The column that these cells make: a view if they lie in one packed column, one by one."""
    if field.extent == "object":
        return [value for value, _ in cells]
    if not cells:
        return _empty(field)
    source, first = cells[0]
    if first is not None and len({id(source) for source, _ in cells}) == 1:
        indices = [i for _, i in cells if i is not None]
        return source.select(indices) if isinstance(source, Ragged) else _scalars(source, indices)
    values = [value_of(cell) for cell in cells]
    if field.extent == "scalar":
        return torch.stack(values)
    try:
        return Ragged.from_rows(values)
    except ValueError as error:
        raise StoreError(f"{field.name} was put in several widths: {error}") from None


def _scalars(column_B: Tensor, indices: list[int]) -> Tensor:
    first = indices[0]
    if indices == list(range(first, first + len(indices))):
        return column_B[first : first + len(indices)]
    return column_B[torch.tensor(indices)]


def _empty(field: Field) -> Column:
    dtype = DTYPES[field.dtype]
    if field.extent == "scalar":
        return torch.empty(0, dtype=dtype)
    return Ragged.packed(torch.empty((0,) * (1 + len(field.trailing)), dtype=dtype), [])
