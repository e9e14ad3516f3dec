"""A column of rows of unequal length: packed values and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Ragged:
    """Rows of unequal length, packed along the first axis; rows are views, never copies.

    Built from rows or from packed values; the other form is made when first asked for.
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
        first = rows[0]
        for i, row in enumerate(rows):
            if row.dim() == 0 or row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"row {i} is {row.dtype} {tuple(row.shape)}, "
                    f"row 0 is {first.dtype} {tuple(first.shape)}: rows may differ in length only"
                )
        return cls(rows, None, [row.shape[0] for row in rows])

    @classmethod
    def packed(cls, values: Tensor, lengths: Sequence[int]) -> Ragged:
        """Take rows that lie one after the other in `values` [sum(lengths), ...]."""
        lengths = [int(n) for n in lengths]
        if any(n < 0 for n in lengths) or sum(lengths) != values.shape[0]:
            raise ValueError(f"lengths {lengths} do not add up to the {values.shape[0]} packed values")
        return cls(None, values, lengths)

    @property
    def rows(self) -> list[Tensor]:
        """The rows, as views."""
        if self._rows is None:
            assert self._values is not None
            self._rows = list(torch.split(self._values, self.lengths))
        return self._rows

    @property
    def values(self) -> Tensor:
        """All rows one after the other [N, ...]; copied together the first time if they lie apart."""
        if self._values is None:
            assert self._rows is not None
            self._values = torch.cat(self._rows)
            self._rows = None
        return self._values

    @property
    def dtype(self) -> torch.dtype:
        return (self._values if self._values is not None else self.rows[0]).dtype

    @property
    def trailing(self) -> tuple[int, ...]:
        """Shape of one value (empty for plain token columns)."""
        return tuple((self._values if self._values is not None else self.rows[0]).shape[1:])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]

    def select(self, indices: Sequence[int]) -> Ragged:
        """Those rows in that order, as views."""
        rows = self.rows
        return Ragged.from_rows([rows[i] for i in indices])

    def to_nested(self) -> Tensor:
        """As torch's jagged nested tensor, with its longest row declared."""
        offsets = torch.tensor([0, *self.lengths]).cumsum(0).to(self.values.device)
        return torch.nested.nested_tensor_from_jagged(
            self.values, offsets, min_seqlen=min(self.lengths), max_seqlen=max(self.lengths)
        )

    @classmethod
    def from_nested(cls, nested: Tensor) -> Ragged:
        """From a jagged nested tensor, without copying."""
        return cls.packed(nested.values(), nested.offsets().diff().tolist())


Column = Ragged | Tensor | list
"""What a field holds for a batch: Ragged; a tensor [B] for scalar fields; a list for object fields."""
