"""Rows for benchmarks of the data plane, and the two forms in which columns are sent by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.ways import ARRAYS, TENSORDICT
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged

TOKEN_FIELDS = (
    *("response_ids", "position_ids", "teacher_topk_ids", "teacher_topk_logprobs"),
    *("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages"),
)
"""Eight ragged fields, 44 bytes for a token with one position axis and a top-1."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many rows, the fewest and most tokens of one, its fields, and widths of their other axes."""

    rows: int
    tokens: tuple[int, int] = (256, 2048)
    fields: tuple[str, ...] = TOKEN_FIELDS
    widths: Mapping[str, int] = field(default_factory=dict)


def draw_lengths(rows: int, tokens: tuple[int, int]) -> list[int]:
    """Tokens of each row, the same at every call."""
    drawn = torch.randint(tokens[0], tokens[1] + 1, (rows,), generator=torch.Generator().manual_seed(rows))
    return drawn.tolist()


def make_columns(shape: Shape) -> dict[str, Ragged]:
    """Packed columns, the same in every process."""
    lengths = draw_lengths(shape.rows, shape.tokens)
    generator = torch.Generator().manual_seed(0)
    columns = {}
    for name in shape.fields:
        trailing = [
            axis if isinstance(axis, int) else shape.widths.get(axis, 1) for axis in FIELDS[name].trailing
        ]
        count = sum(lengths) * prod(trailing)
        if FIELDS[name].dtype == "float32":
            values = torch.rand(count, generator=generator)
        else:
            values = torch.randint(0, 2, (count,), generator=generator)
        columns[name] = Ragged.packed(values.view(-1, *trailing), lengths)
    return columns


def make_batch(partition: str, lengths: Sequence[int], first: int = 0) -> BatchRef:
    """Keys and tags of rows of these lengths; prompts are numbered from `first`."""
    keys = tuple(Key(first + i) for i in range(len(lengths)))
    tags = tuple(Tags(domain="math", prompt_tokens=20, response_tokens=n, version_min=3) for n in lengths)
    return BatchRef(partition, keys, tags)


class Arrays:
    """Columns as numpy arrays, which Ray sends without pickling them: the best that can be done by hand."""

    name = ARRAYS

    @staticmethod
    def wrap(columns: Mapping[str, Ragged]) -> Any:
        """What is sent."""
        return {name: (column.values.numpy(), np.array(column.lengths)) for name, column in columns.items()}

    @staticmethod
    def unwrap(sent: Any) -> dict[str, Ragged]:
        """The columns, sharing memory with what was sent."""
        return {name: Ragged.packed(_tensor(x), lengths.tolist()) for name, (x, lengths) in sent.items()}


class TensorDicts:
    """Columns as a TensorDict of jagged nested tensors, as trainers of this kind send them."""

    name = TENSORDICT

    @staticmethod
    def wrap(columns: Mapping[str, Ragged]) -> Any:
        """What is sent. A view is copied first: pickled, it would bring all that it is a view of."""
        tensors = {
            name: torch.nested.as_nested_tensor(
                list(_whole(column.values).split(column.lengths)), layout=torch.jagged
            )
            for name, column in columns.items()
        }
        return TensorDict(tensors, batch_size=len(next(iter(columns.values()))))

    @staticmethod
    def unwrap(sent: Any) -> dict[str, Ragged]:
        """The columns."""
        return {name: Ragged.from_rows(value.unbind()) for name, value in sent.items()}


FORMS: dict[str, type[Arrays] | type[TensorDicts]] = {form.name: form for form in (TensorDicts, Arrays)}


def _whole(values: Tensor) -> Tensor:
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor on the array's memory; torch warns of read-only ones, and nobody writes here."""
    where = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}
    holder = type("Shared", (), {"__array_interface__": where, "array": array})()
    return torch.from_numpy(np.asarray(holder)) if array.size else torch.from_numpy(array.copy())
