"""Columns that no store may take, each with what the error must say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged

from .rows import make_column

ONE = BatchRef("train", (Key(7),), (Tags(),))
"""The batch that the bad columns are for."""


def uneven(name: str, batch: BatchRef) -> Column:
    """The column of `name` with one token more in the last row."""
    column = make_column(name, batch)
    assert isinstance(column, Ragged)
    rows = list(column.rows)
    rows[-1] = torch.cat([rows[-1], rows[-1].new_ones((1, *rows[-1].shape[1:]))])
    return Ragged.from_rows(rows)


def ragged(values: torch.Tensor) -> Ragged:
    return Ragged.packed(values, [len(values)])


BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"old_logprob": ragged(torch.zeros(2))}, "did you mean 'old_logprobs'"),
    "dtype": ({"response_ids": ragged(torch.zeros(2))}, "response_ids of prompt 7"),
    "dtype of a scalar": ({"reward": torch.zeros(1, dtype=torch.float64)}, "reward of prompt 7"),
    "grad": ({"values": ragged(torch.zeros(2, requires_grad=True))}, "values of prompt 7.*detach"),
    "grad of a row": (
        {"values": Ragged.from_rows([torch.zeros(2, requires_grad=True)])},
        "values of prompt 7.*detach",
    ),
    "grad of a scalar": ({"reward": torch.zeros(1, requires_grad=True)}, "reward of prompt 7"),
    "rows": ({"values": Ragged.packed(torch.zeros(2), [1, 1])}, "values has 2 rows.*prompt 7"),
    "rows of a scalar": ({"reward": torch.zeros(3)}, "reward has 3 rows.*1 keys"),
    "rows of objects": ({"multi_modal_inputs": []}, "multi_modal_inputs has 0 rows"),
    "rank too high": ({"values": ragged(torch.zeros(2, 3))}, r"values of prompt 7.*\[2, 3\]"),
    "rank too low": (
        {"teacher_topk_ids": ragged(torch.zeros(2, dtype=torch.int64))},
        "teacher_topk_ids of prompt 7",
    ),
    "rank of a scalar": ({"reward": torch.zeros(1, 1)}, r"reward is \[1, 1\]"),
    "tensor for ragged": ({"values": torch.zeros(1)}, "values is a Tensor"),
    "ragged for scalar": ({"reward": ragged(torch.zeros(2))}, "reward is a Ragged"),
    "ragged for objects": ({"multi_modal_inputs": ragged(torch.zeros(2))}, "multi_modal_inputs"),
    "an object that can't be saved": (
        {"multi_modal_inputs": [{"image": Path("a.png")}]},
        "multi_modal_inputs of prompt 7.*Path",
    ),
    "an object with grad": (
        {"multi_modal_inputs": [[torch.zeros(1, requires_grad=True)]]},
        "multi_modal_inputs of prompt 7.*grad",
    ),
}
