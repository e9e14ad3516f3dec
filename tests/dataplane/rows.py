"""Rows for tests: batches and columns whose values follow from their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged

WIDTH = 3
TOKENS = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs")


def make_batch(count: int, *, start: int = 0, partition: str = "train") -> BatchRef:
    """Rows of `count` prompts, tagged with their prompt's number."""
    keys = tuple(Key(i, i % 2, i % 3) for i in range(start, start + count))
    return BatchRef(partition, keys, tuple(Tags(domain=f"d{key.prompt}") for key in keys))


def prompt_tokens(key: Key) -> int:
    return 1 + key.prompt % 4


def response_tokens(key: Key) -> int:
    return key.prompt % 5  # some responses are empty


def make_value(name: str, key: Key, shift: int = 0) -> object:
    """What row `key` holds in field `name`; `shift` makes another value of the same shape."""
    field = FIELDS[name]
    seed = 100 * key.prompt + shift
    if field.extent == "object":
        return {"pixels": torch.arange(4.0).view(2, 2) + seed, "sizes": [(2, seed), None, "png"]}
    tokens = {"prompt": prompt_tokens(key), "response": response_tokens(key)}
    tokens |= {"sequence": sum(tokens.values())}
    shape = [tokens[field.extent]] if field.extent != "scalar" else []
    shape += [WIDTH] * len(field.trailing)
    count = torch.Size(shape).numel()
    values = torch.arange(count).view(shape) + seed
    return values % 2 == 0 if field.dtype == "bool" else values.to(getattr(torch, field.dtype))


def make_column(name: str, batch: BatchRef, shift: int = 0) -> Column:
    """The column of field `name`, rows that lie apart in memory."""
    values = [make_value(name, key, shift) for key in batch.keys]
    extent = FIELDS[name].extent
    if extent == "object":
        return values
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(tensors) if extent == "scalar" else Ragged.from_rows(tensors)


def make_columns(batch: BatchRef, names: Sequence[str] = TOKENS, shift: int = 0) -> dict[str, Column]:
    return {name: make_column(name, batch, shift) for name in names}


def same(left: object, right: object) -> bool:
    """Equal to the bit, dtypes and shapes and container types too."""
    if isinstance(left, Ragged) and isinstance(right, Ragged):
        return left.lengths == right.lengths and same(left.values, right.values)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right
