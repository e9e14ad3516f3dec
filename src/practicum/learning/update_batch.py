"""What the student and the critic learn from: the columns of one mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from practicum.algorithms.segments import segment_count, segment_sum
from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning.distill_loss import TeacherColumns
from practicum.learning.packing import RowExtras


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """A mini-batch whose rows lie on several ranks: a number for each of its rows, whichever has it."""

    sessions: Sequence[int]
    sampled_tokens: Sequence[int]
    session_tokens: Sequence[int] | None = None
    teachers: Sequence[int] | None = None
    """As in `UpdateBatch` and `TeacherColumns`."""

    def select(self, rows: Sequence[int]) -> BatchFacts:
        """Those rows in that order."""
        session_tokens, teachers = (
            None if numbers is None else [numbers[row] for row in rows]
            for numbers in (self.session_tokens, self.teachers)
        )
        sessions, sampled = (
            [numbers[row] for row in rows] for numbers in (self.sessions, self.sampled_tokens)
        )
        return BatchFacts(sessions, sampled, session_tokens, teachers)


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """One mini-batch of the student: the rows of one optimizer step, on the CPU.

    Advantages are needed by every policy loss, ref_logprobs by a KL penalty in the loss. Without
    old_logprobs the ratio's denominator is the student itself. For rows that these very weights sampled,
    rollout_logprobs (at the sampling temperature) or plain_logprobs (at 1) are compared with the learner's.
    """

    prompt_ids: Ragged
    response_ids: Ragged
    response_mask: Ragged
    sessions: Sequence[int]
    """The session of each row; rows of one session have one number."""
    advantages: Ragged | None = None
    old_logprobs: Ragged | None = None
    rollout_logprobs: Ragged | None = None
    plain_logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    teachers: TeacherColumns | None = None
    groups: Sequence[int] | None = None
    """A number for each row: what is measured is also given by these groups."""
    session_tokens: Sequence[int] | None = None
    """Sampled tokens of each row's session in the step's whole batch; None: a session's rows are all here."""
    extras: RowExtras | None = None
    recorded: Sequence[bool] | None = None
    """Whether the numbers of each row's tokens are kept for the run's record."""
    whole: BatchFacts | None = None
    """The whole mini-batch, if these are only this rank's rows of it; session_tokens are then given there."""


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """One mini-batch of the critic; `values` are its own from before the step."""

    prompt_ids: Ragged
    response_ids: Ragged
    response_mask: Ragged
    values: Ragged
    returns: Ragged
    extras: RowExtras | None = None
    whole_tokens: int | None = None
    """Sampled tokens of the whole mini-batch, if these are only this rank's rows of it."""


@dataclass(frozen=True, slots=True)
class SessionNumbers:
    """The sessions of a whole mini-batch, numbered from 0 up."""

    rows: list[int]
    """The session of each row that is here."""
    session_B: Tensor
    """The session of each row of the mini-batch."""
    tokens_S: Tensor
    """Sampled tokens of each in the mini-batch."""
    whole_S: Tensor
    """And in the step's whole batch."""

    def __len__(self) -> int:
        return len(self.tokens_S)


def sessions_of(batch: UpdateBatch, sampled_M: Tensor) -> SessionNumbers:
    """The sessions of a mini-batch; `sampled_M` tells which of the tokens that are here are sampled."""
    whole, rows = batch.whole, np.asarray(batch.sessions, dtype=np.int64)
    everywhere = rows if whole is None else np.asarray(whole.sessions, dtype=np.int64)
    names, dense = np.unique(everywhere, return_inverse=True)
    rows, session_B = np.searchsorted(names, rows).tolist(), torch.from_numpy(dense)
    if whole is None:
        given = batch.session_tokens
        tokens_S = segment_count(per_token(rows, batch.response_ids.lengths)[sampled_M], len(names))
    else:
        given = whole.session_tokens
        sampled_B = torch.tensor(whole.sampled_tokens, dtype=torch.int64)
        tokens_S = segment_sum(sampled_B, session_B, len(names))
    whole_S = tokens_S if given is None else _whole_tokens(given, session_B, tokens_S)
    return SessionNumbers(rows, session_B, tokens_S, whole_S)


def _whole_tokens(given: Sequence[int], row_B: Tensor, tokens_S: Tensor) -> Tensor:
    """Sampled tokens [S] of each session in the step's batch, with `tokens_S` of them in this mini-batch."""
    tokens_B = torch.tensor(given)
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
    return torch.repeat_interleave(
        torch.tensor(rows, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
    )


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
        raise DataError(f"the mini-batch is missing {name}, which {why} needs")
    return column


def _shorten(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"{lengths[:8]}… ({len(lengths)} rows)"
