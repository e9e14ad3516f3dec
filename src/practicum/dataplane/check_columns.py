"""What a put must satisfy, by the fields table. Every store checks with these before it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import torch
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS, Field
from practicum.dataplane.keys import Key, name_keys
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import StoreError

Spans = dict[str, list[int]]
"""Tokens of each row, for the ragged extents that a put has columns of."""


def dtype_of(field: Field) -> torch.dtype:
    """The number type of a field of tensors."""
    return getattr(torch, field.dtype)


def field_of(name: str) -> Field:
    """The field of that name; a StoreError with the nearest name if there is none."""
    field = FIELDS.get(name)
    if field is None:
        near = get_close_matches(name, FIELDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FIELDS)}"
        raise StoreError(f"there is no field {name!r}: {hint}")
    return field


def empty_column(field: Field) -> Column:
    """The field's column for a batch without rows."""
    if field.extent == "object":
        return []
    dtype = dtype_of(field)
    if field.extent == "scalar":
        return torch.empty(0, dtype=dtype)
    return Ragged.packed(torch.empty((0,) * (1 + len(field.trailing)), dtype=dtype), [])


def check_columns(batch: BatchRef, columns: Mapping[str, Column]) -> Spans:
    """Each column against its field, and the columns against each other; their lengths per row."""
    spans: Spans = {}
    first_names: dict[str, str] = {}
    for name, column in columns.items():
        field = field_of(name)
        if field.extent == "object":
            _check_objects(field, batch, column)
        elif field.extent == "scalar":
            _check_scalars(field, batch, column)
        else:
            lengths = _check_ragged(field, batch, column)
            first = first_names.setdefault(field.extent, name)
            if spans.setdefault(field.extent, lengths) != lengths:
                _raise_uneven(batch.keys, name, lengths, first, spans[field.extent])
    return spans


def _raise_uneven(
    keys: Sequence[Key], name: str, lengths: list[int], other: str, expected: list[int]
) -> None:
    for key, length, other_length in zip(keys, lengths, expected, strict=True):
        if length != other_length:
            raise StoreError(
                f"{name} of {key} has {length} tokens, but {other} of the same put has {other_length}"
            )


def _check_rows(field: Field, batch: BatchRef, rows: int) -> None:
    if rows != len(batch):
        keys = f" ({name_keys(batch.keys)})" if batch.keys else ""
        raise StoreError(f"{field.name} has {rows} rows for a batch of {len(batch)} keys{keys}")


def _check_tensor(field: Field, key: str, tensor: Tensor) -> None:
    if tensor.dtype is not dtype_of(field):
        raise StoreError(f"{field.name} of {key} is {tensor.dtype}, expected torch.{field.dtype}")
    if tensor.requires_grad:
        raise StoreError(f"{field.name} of {key} requires grad: detach it before the put")


def _check_ragged(field: Field, batch: BatchRef, column: Column) -> list[int]:
    if not isinstance(column, Ragged):
        raise StoreError(f"{field.name} is a {type(column).__name__}, expected a Ragged")
    _check_rows(field, batch, len(column))
    if not len(column):
        return []
    if column.is_packed:
        _check_tensor(field, str(batch.keys[0]), column.values)
    else:
        dtype = dtype_of(field)
        for key, row in zip(batch.keys, column.rows, strict=True):
            if row.dtype is not dtype or row.requires_grad:
                _check_tensor(field, str(key), row)
    if len(column.trailing) != len(field.trailing) or any(
        isinstance(axis, int) and axis != width
        for axis, width in zip(field.trailing, column.trailing, strict=True)
    ):
        axes = ", ".join((f"{field.extent} tokens", *map(str, field.trailing)))
        shape = (column.lengths[0], *column.trailing)
        raise StoreError(f"{field.name} of {batch.keys[0]} is {list(shape)}, expected [{axes}]")
    return list(column.lengths)


def _check_scalars(field: Field, batch: BatchRef, column: Column) -> None:
    if not isinstance(column, Tensor):
        raise StoreError(f"{field.name} is a {type(column).__name__}, expected a tensor [rows]")
    if column.dim() != 1:
        raise StoreError(f"{field.name} is {list(column.shape)}, expected [{len(batch)}]")
    _check_rows(field, batch, column.shape[0])
    if len(batch):
        _check_tensor(field, str(batch.keys[0]), column)


def _check_objects(field: Field, batch: BatchRef, column: Column) -> None:
    if not isinstance(column, list):
        raise StoreError(f"{field.name} is a {type(column).__name__}, expected a list of objects")
    _check_rows(field, batch, len(column))
    for key, value in zip(batch.keys, column, strict=True):
        wrong = _not_plain(value)
        if wrong:
            raise StoreError(
                f"{field.name} of {key} holds {wrong}; a store takes tensors without grad, "
                "numbers, strings, None, and lists, tuples and dicts of them"
            )


def _not_plain(value: object) -> str:
    """What in `value` could not be saved and loaded safely; empty if nothing."""
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
