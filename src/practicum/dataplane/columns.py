"""Columns of a batch: checked before a put, gathered from cells for a get, and those of padding rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any

import torch
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.keys import Key, Tags, name_keys
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import StoreError

Cell = tuple[Any, int | None]
"""A row's value in a field: a column and the row in it, of which a view is made when it is read; or (value,
None)."""


def dtype_of(field: Field) -> torch.dtype:
    return getattr(torch, field.dtype)


def field_of(name: str) -> Field:
    """Return the field of that name, or raise a StoreError with the nearest name."""
    field = FIELDS.get(name)
    if field is None:
        near = get_close_matches(name, FIELDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(FIELDS)}"
        raise StoreError(f"unknown field {name!r}: {hint}")
    return field


def check_columns(batch: BatchRef, columns: Mapping[str, Column]) -> dict[str, list[int]]:
    """Check each column against its field and the others. Return the rows' tokens by ragged extent."""
    spans: dict[str, list[int]] = {}
    first_names: dict[str, str] = {}
    for name, column in columns.items():
        field = field_of(name)
        expected = {"object": list, "scalar": Tensor}.get(field.extent, Ragged)
        if not isinstance(column, expected):
            raise StoreError(f"{name} is a {type(column).__name__}, expected a {expected.__name__}")
        if isinstance(column, Tensor) and column.dim() != 1:
            raise StoreError(f"{name} is {list(column.shape)}, expected [{len(batch)}]")
        if len(column) != len(batch):
            keys = f" ({name_keys(batch.keys)})" if batch.keys else ""
            raise StoreError(f"{name} has {len(column)} rows for a batch of {len(batch)} keys{keys}")
        _check_values(field, batch.keys, column)
        if isinstance(column, Ragged):
            first = first_names.setdefault(field.extent, name)
            if spans.setdefault(field.extent, list(column.lengths)) != column.lengths:
                rows = zip(batch.keys, column.lengths, spans[field.extent], strict=True)
                key, found, other = next(row for row in rows if row[1] != row[2])
                raise StoreError(
                    f"{name} of {key} has {found} tokens, but {first} of the same put has {other}"
                )
    return spans


def _check_values(field: Field, keys: Sequence[Key], column: Column) -> None:
    if isinstance(column, list):
        for key, value in zip(keys, column, strict=True):
            if wrong := _not_plain(value):
                raise StoreError(
                    f"{field.name} of {key} holds {wrong}; a store takes tensors without grad, "
                    "numbers, strings, None, and lists, tuples and dicts of them"
                )
        return
    if not keys:
        return
    if isinstance(column, Ragged):
        tensors = [column.values] if column.is_packed else column.rows
    else:
        tensors = [column]
    dtype = dtype_of(field)
    for key, tensor in zip(keys, tensors, strict=False):
        if tensor.dtype is not dtype:
            raise StoreError(f"{field.name} of {key} is {tensor.dtype}, expected {dtype}")
        if tensor.requires_grad:
            raise StoreError(f"{field.name} of {key} requires grad: detach it before the put")
    trailing = tuple(tensors[0].shape[1:])
    if len(trailing) != len(field.trailing) or any(
        isinstance(axis, int) and axis != width for axis, width in zip(field.trailing, trailing, strict=True)
    ):
        axes = ", ".join((f"{field.extent} tokens", *map(str, field.trailing)))
        raise StoreError(f"{field.name} of {keys[0]} is {list(tensors[0].shape)}, expected [{axes}]")


def _not_plain(value: object) -> str:
    """Describe what in `value` could not be saved and loaded safely, if anything."""
    # Exact types: a subclass would come back from disk as its base, or not at all.
    if value is None or type(value) in (bool, int, float, str):
        return ""
    if isinstance(value, Tensor):
        return "a tensor that requires grad" if value.requires_grad else ""
    if type(value) is dict:
        return next((w for pair in value.items() for w in map(_not_plain, pair) if w), "")
    if type(value) in (list, tuple):
        return next((w for w in map(_not_plain, value) if w), "")  # pyright: ignore[reportArgumentType]
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def cell_value(cell: Cell) -> Any:
    """Return the row's value: a tensor, or the object of an object field."""
    source, row = cell
    return source if row is None else source[row]


def gather_cells(field: Field, cells: Sequence[Cell]) -> Column:
    """Return the column of these cells: a view if they are neighbours in one packed column."""
    if field.extent == "object":
        return [cell_value(cell) for cell in cells]
    if not cells:
        empty = torch.empty((0,) * (1 + len(field.trailing)), dtype=dtype_of(field))
        return empty if field.extent == "scalar" else Ragged.packed(empty, [])
    source, first = cells[0]
    if first is not None and len({id(source) for source, _ in cells}) == 1:
        rows = [row for _, row in cells if row is not None]
        if isinstance(source, Ragged):
            return source.select(rows)
        is_slice = rows == list(range(first, first + len(rows)))
        return source[first : first + len(rows)] if is_slice else source[torch.tensor(rows)]
    values = [cell_value(cell) for cell in cells]
    if field.extent == "scalar":
        return torch.stack(values)
    try:
        return Ragged.from_rows(values)
    except ValueError as error:
        raise StoreError(f"{field.name} was put in several widths: {error}") from None


# Padding rows fill a batch up to a number that can be cut evenly, and are never trained on: one prompt token,
# one response token, no sampled token. Each has its own key, is in no group, and its fields follow the
# padding rule of the fields table.
PADDING_PROMPT = -1
"""The prompt of all padding rows: no stream has it."""
PADDING_TOKENS = 2
"""Tokens of a padding row."""

_TOKENS = {"prompt": 1, "response": 1, "sequence": PADDING_TOKENS}
_TAGS = Tags(prompt_tokens=1, response_tokens=1, sampled_tokens=0, is_padding=True)


def padding_batch(
    partition: str,
    count: int,
    fields: Sequence[str],
    *,
    end_id: int,
    widths: Mapping[str, int],
    first: int = 0,
) -> tuple[BatchRef, dict[str, Column]]:
    """Return padding rows for one put, keys from `first`; `widths` are sizes of axes by letter."""
    keys = tuple(Key(PADDING_PROMPT, number) for number in range(first, first + count))
    batch = BatchRef(partition, keys, (_TAGS,) * count)
    return batch, {name: _padding_column(field_of(name), count, end_id, widths) for name in fields}


def _padding_column(field: Field, count: int, end_id: int, widths: Mapping[str, int]) -> Column:
    assert field.padding is not None
    if field.padding == "empty":
        return [{} for _ in range(count)]
    tokens = () if field.extent == "scalar" else (_TOKENS[field.extent],)
    shape = (*tokens, *(axis if isinstance(axis, int) else widths[axis] for axis in field.trailing))
    if field.padding == "positions":
        value = torch.arange(shape[0]).repeat_interleave(prod(shape[1:])).view(shape).to(dtype_of(field))
    else:
        value = torch.full(shape, end_id if field.padding == "end_token" else 0, dtype=dtype_of(field))
    # A plain copy: one of a single row keeps the stride 0 of the expansion, and has no bytes to look at.
    values = value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)
    if field.extent == "scalar":
        return values
    return Ragged.packed(values.flatten(0, 1), [value.shape[0]] * count)
