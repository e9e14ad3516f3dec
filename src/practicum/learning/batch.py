"""What the student and the critic learn from: the columns of one mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning.teaching import TeacherColumns


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """One mini-batch of the student: the rows of one optimizer step, on the CPU.

    Advantages are needed by every policy loss, ref_logprobs by a KL penalty in the loss. Without
    old_logprobs the ratio's denominator is the student itself. plain_logprobs, given for rows that these very
    weights sampled, are compared with the learner's (gap metrics).
    """

    prompt_ids: Ragged
    response_ids: Ragged
    response_mask: Ragged
    sessions: Sequence[int]
    """The session of each row; rows of one session have one number."""
    advantages: Ragged | None = None
    old_logprobs: Ragged | None = None
    plain_logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    teachers: TeacherColumns | None = None
    groups: Sequence[int] | None = None
    """A number for each row: what is measured is also given by these groups."""


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """One mini-batch of the critic; `values` are its own from before the step."""

    prompt_ids: Ragged
    response_ids: Ragged
    response_mask: Ragged
    values: Ragged
    returns: Ragged


def dense_sessions(sessions: Sequence[int]) -> tuple[list[int], int]:
    """Session numbers as 0, 1, 2, … and how many there are."""
    names, dense = np.unique(np.asarray(sessions, dtype=np.int64), return_inverse=True)
    return dense.tolist(), len(names)


def per_token(rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """A number per row, repeated for each of its response tokens."""
    return torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths))


def token_column(batch: UpdateBatch | CriticBatch, name: str) -> Tensor | None:
    """A response column packed [M]; its rows must be as long as the responses."""
    column: Ragged | None = getattr(batch, name)
    if column is None:
        return None
    if column.lengths != batch.response_ids.lengths:
        raise DataError(
            f"{name} has rows of {_shorten(column.lengths)} tokens, "
            f"response_ids of {_shorten(batch.response_ids.lengths)}: they must agree"
        )
    return column.values


def need_column(batch: UpdateBatch | CriticBatch, name: str, why: str) -> Tensor:
    """As `token_column`, for a column that must be there."""
    column = token_column(batch, name)
    if column is None:
        raise DataError(f"the mini-batch lacks {name}, which {why} needs")
    return column


def _shorten(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"{lengths[:8]}… ({len(lengths)} rows)"
