"""What the student and the critic learn from: the columns of one mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning.extras import RowExtras
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
    session_tokens: Sequence[int] | None = None
    """Sampled tokens of each row's session in the step's whole batch; None: a session's rows are all here."""
    extras: RowExtras | None = None


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """One mini-batch of the critic; `values` are its own from before the step."""

    prompt_ids: Ragged
    response_ids: Ragged
    response_mask: Ragged
    values: Ragged
    returns: Ragged
    extras: RowExtras | None = None


def dense_sessions(sessions: Sequence[int]) -> tuple[list[int], int]:
    """Session numbers as 0, 1, 2, … and how many there are."""
    names, dense = np.unique(np.asarray(sessions, dtype=np.int64), return_inverse=True)
    return dense.tolist(), len(names)


def whole_session_tokens(batch: UpdateBatch, sessions: Sequence[int], tokens_S: Tensor) -> Tensor:
    """Sampled tokens [S] of each session in the step's batch, with `tokens_S` of them in this mini-batch.

    `sessions` is the session of each row, from 0 up.
    """
    if batch.session_tokens is None:
        return tokens_S
    row_B, tokens_B = torch.tensor(sessions), torch.tensor(batch.session_tokens)
    whole_S = torch.zeros_like(tokens_S).scatter_reduce(0, row_B, tokens_B, "amax")
    wrong_B = (whole_S[row_B] != tokens_B) | (tokens_B < tokens_S[row_B])
    if wrong_B.any():
        row = int(wrong_B.nonzero()[0])
        raise DataError(
            f"session_tokens of row {row} is {int(tokens_B[row])}: rows of one session must have one number, "
            f"at least the {int(tokens_S[row_B[row]])} tokens that this mini-batch holds of it"
        )
    return whole_S


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
