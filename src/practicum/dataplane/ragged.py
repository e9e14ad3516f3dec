"""Columns of rows: `Ragged`, of rows of unequal length, and those that a stage reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from practicum.errors import StoreError


class Ragged:
    """Rows of unequal length, packed along the first axis. Rows are views, never copies.

    Built from rows or from packed values. The other form is made when first asked for. What it
    holds is not meant to be changed, so it may be shared between threads.
    """

    __slots__ = ("_rows", "_values", "lengths")

    def __init__(self, rows: list[Tensor] | None, values: Tensor | None, lengths: list[int]) -> None:
        self._rows, self._values, self.lengths = rows, values, lengths

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Take rows [R_i, ...] of one dtype and one trailing shape, without copying them."""
        rows = list(rows)
        if not rows:
            raise ValueError("a ragged column needs at least one row")
        dtype, dim, trailing = rows[0].dtype, rows[0].dim(), rows[0].shape[1:]
        for i, row in enumerate(rows):
            # Plain token rows, the usual case, are told apart by rank: comparing shapes is slow.
            alike = row.dtype is dtype and row.dim() == dim > 0
            if not alike or (dim > 1 and row.shape[1:] != trailing):
                raise ValueError(
                    f"row {i} is {row.dtype} {tuple(row.shape)}, "
                    f"row 0 is {dtype} {tuple(rows[0].shape)}: rows may differ in length only"
                )
        return cls(rows, None, [row.shape[0] for row in rows])

    @classmethod
    def packed(cls, values: Tensor, lengths: Sequence[int]) -> Ragged:
        """Return rows that are packed one after the other in `values` [sum(lengths), ...]."""
        lengths = [int(n) for n in lengths]
        if values.dim() == 0:
            raise ValueError("packed values need a first axis to be cut along")
        if min(lengths, default=0) < 0 or sum(lengths) != values.shape[0]:
            raise ValueError(
                f"{len(lengths)} lengths from {min(lengths, default=0)} up add up to "
                f"{sum(lengths)}, but there are {values.shape[0]} packed values"
            )
        return cls(None, values, lengths)

    @property
    def rows(self) -> list[Tensor]:
        rows = self._rows
        if rows is None:
            assert self._values is not None
            self._rows = rows = list(torch.split(self._values, self.lengths))
        return rows

    @property
    def values(self) -> Tensor:
        """All rows one after the other [N, ...]. If built from rows, these become views of the copy."""
        values = self._values
        if values is None:
            assert self._rows is not None
            values = torch.cat(self._rows)
            self._values, self._rows = values, None
        return values

    @property
    def is_packed(self) -> bool:
        return self._values is not None

    @property
    def trailing(self) -> tuple[int, ...]:
        """Shape of one value (empty for plain token columns)."""
        values = self._values
        return tuple((self.rows[0] if values is None else values).shape[1:])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]

    def select(self, indices: Sequence[int]) -> Ragged:
        """Return these rows in this order, as views. Neighbouring rows stay packed."""
        indices = list(indices)
        if indices and not 0 <= min(indices) <= max(indices) < len(self):
            wrong = next(i for i in indices if not 0 <= i < len(self))
            raise IndexError(f"row {wrong} of a ragged column of {len(self)} rows does not exist")
        lengths, values = [self.lengths[i] for i in indices], self._values
        first = indices[0] if indices else 0
        if values is not None and indices == list(range(first, first + len(indices))):
            begin = sum(self.lengths[:first])
            return Ragged(None, values[begin : begin + sum(lengths)], lengths)
        rows = self.rows
        return Ragged([rows[i] for i in indices], None, lengths) if indices else self.packed(rows[0][:0], [])

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged.packed, (self.values, self.lengths)


Column = Ragged | Tensor | list
"""What a field holds for a batch: Ragged; a tensor [B] if scalar; a list if of objects."""


class Columns(Mapping[str, Column]):
    """The columns that a stage reads. Asking for one that it did not declare is a StoreError."""

    def __init__(self, stage: str, columns: Mapping[str, Column]) -> None:
        self._stage, self._columns = stage, columns

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise StoreError(
                f"stage {self._stage!r} asked for {name!r}, which its reads do not declare: "
                f"{', '.join(sorted(self._columns)) or 'nothing'}"
            )
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def ragged(self, name: str) -> Ragged:
        column = self[name]
        assert isinstance(column, Ragged), f"{name} is not a ragged field"
        return column

    def select(self, name: str, rows: Sequence[int]) -> Ragged | None:
        """Return these rows of a column of tokens, in this order, or None if the stage doesn't read it."""
        return self.ragged(name).select(rows) if name in self else None

    def objects(self, name: str) -> list[Any]:
        column = self[name]
        assert isinstance(column, list), f"{name} is not an object field"
        return column
