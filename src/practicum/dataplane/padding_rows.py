"""Padding rows: they fill a batch up to a number that can be cut evenly, and are never trained on.

A padding row has one prompt token, one response token and no sampled token. It has its own key, is in
no group, and each of its fields follows the padding rule of the fields table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import dtype_of, field_of
from practicum.dataplane.fields import Field
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged

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
    """`count` padding rows with these fields, for one put; their keys are numbered from `first`.

    `widths` gives the axes after the tokens by their letter in the fields table (D, K, H, L, E).
    """
    keys = tuple(Key(PADDING_PROMPT, number) for number in range(first, first + count))
    batch = BatchRef(partition, keys, (_TAGS,) * count)
    return batch, {name: _column(field_of(name), count, end_id, widths) for name in fields}


def _column(field: Field, count: int, end_id: int, widths: Mapping[str, int]) -> Column:
    assert field.padding is not None
    if field.padding == "empty":
        return [{} for _ in range(count)]
    tokens = () if field.extent == "scalar" else (_TOKENS[field.extent],)
    shape = (*tokens, *(axis if isinstance(axis, int) else widths[axis] for axis in field.trailing))
    if field.padding == "positions":
        value = torch.arange(shape[0]).repeat_interleave(prod(shape[1:])).view(shape).to(dtype_of(field))
    else:
        fill = end_id if field.padding == "end_token" else 0
        value = torch.full(shape, fill, dtype=dtype_of(field))
    # A plain copy: one of a single row keeps the stride 0 of the expansion, and has no bytes to look at.
    values = value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)
    if field.extent == "scalar":
        return values
    return Ragged.packed(values.flatten(0, 1), [value.shape[0]] * count)
