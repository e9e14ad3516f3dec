"""Inputs and reports of an update: columns of a mini-batch, means over its tokens, and its trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from practicum.algorithms.segments import segment_count, segment_sum
from practicum.dataplane.ragged import Column, Ragged
from practicum.errors import DataError
from practicum.learning.packing import RowExtras
from practicum.observe.records.record_files import TRACED

TOP = 8
"""The student's most likely tokens that a trace has, beside a teacher's."""
_LARGEST_LOG = 100.0
"""Importance weights beyond this are as bad as any; squares of larger ones would overflow."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """A number for each row of a mini-batch, whichever rank has the row. See `UpdateBatch`."""

    sessions: Sequence[int]
    sampled_tokens: Sequence[int]
    session_tokens: Sequence[float]
    teachers: Sequence[int]
    weights: Sequence[float]
    """Summed weights of the row's sampled tokens: their number unless the batch has a token_weight."""

    def select(self, rows: Sequence[int]) -> BatchFacts:
        counts = (self.sessions, self.sampled_tokens, self.teachers)
        sessions, sampled, teachers = ([numbers[row] for row in rows] for numbers in counts)
        tokens, weights = ([sums[row] for row in rows] for sums in (self.session_tokens, self.weights))
        return BatchFacts(sessions, sampled, tokens, teachers, weights)


@dataclass(frozen=True, slots=True)
class TeacherColumns:
    """Scores of the teachers for each response token. `teacher` numbers the teacher of each row."""

    teacher: Sequence[int]
    logprobs: Ragged
    topk_ids: Ragged | None = None
    topk_logprobs: Ragged | None = None
    hidden: Ragged | None = None
    match: Ragged | None = None
    """With the signal `shared`: which tokens can be compared (`fields.SHARED_TOKEN`)."""
    weight: Ragged | None = None
    """Factor of each token's divergence in the loss; other terms and all denominators stay."""
    factors: Mapping[int, float] | None = None
    """Factors of teachers' tokens in the loss, by number; the sum of all weights stays."""


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
    """A number for each row: `Learner.by_group` has sums by these groups."""
    session_tokens: Sequence[float] | None = None
    """Sampled tokens of each row's session in the step's whole batch, or the sum of their weights.

    None: a session's rows are all here."""
    token_weight: Ragged | None = None
    """Factor of each token in the loss; of a token that was not sampled, of its cross-entropy."""
    extras: RowExtras | None = None
    recorded: Sequence[bool] | None = None
    """True for rows whose tokens the run's record has."""
    whole: BatchFacts | None = None
    """The whole mini-batch, if these are only this rank's rows of it."""


@dataclass(frozen=True, slots=True)
class CriticBatch:
    """One mini-batch of the critic. `values` are its own from before the step."""

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
    """The session of each row of this rank."""
    session_B: Tensor
    """The session of each row of the mini-batch."""
    tokens_S: Tensor
    """Sampled tokens of each session in the mini-batch, or the sum of their weights."""
    whole_S: Tensor
    """The same of each session in the step's whole batch."""


def sessions_of(batch: UpdateBatch, sampled_M: Tensor, weight_M: Tensor | None = None) -> SessionNumbers:
    """Number the sessions of a mini-batch. `sampled_M` is True for sampled tokens of these rows."""
    whole, rows = batch.whole, np.asarray(batch.sessions, dtype=np.int64)
    everywhere = rows if whole is None else np.asarray(whole.sessions, dtype=np.int64)
    names, dense = np.unique(everywhere, return_inverse=True)
    rows, session_B = np.searchsorted(names, rows).tolist(), torch.from_numpy(dense)
    if whole is None:
        session_tokens = batch.session_tokens
        session_M = per_token(rows, batch.response_ids.lengths)[sampled_M]
        tokens_S = segment_count(session_M, len(names))
        if weight_M is not None:
            tokens_S = segment_sum(weight_M[sampled_M].double(), session_M, len(names))
    else:
        session_tokens = whole.session_tokens
        tokens_S = segment_sum(torch.tensor(whole.weights), session_B, len(names))
    whole_S = tokens_S
    if session_tokens is not None:
        tokens_B = torch.tensor(session_tokens, dtype=tokens_S.dtype)
        whole_S = torch.zeros_like(tokens_S).scatter_reduce(0, session_B, tokens_B, "amax")
    return SessionNumbers(rows, session_B, tokens_S, whole_S)


def per_token(rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Repeat a number per row for each of its response tokens."""
    return torch.tensor(rows, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def token_column(batch: UpdateBatch | CriticBatch, name: str) -> Tensor | None:
    """Return a response column packed [M]. Its rows must be as long as the responses."""
    column: Ragged | None = getattr(batch, name)
    if column is not None and column.lengths != batch.response_ids.lengths:
        raise DataError(f"{name} and response_ids have rows of different lengths")
    return None if column is None else column.values


def need_column(batch: UpdateBatch | CriticBatch, name: str, why: str) -> Tensor:
    """Return a column as `token_column` does. Raise DataError if it is missing."""
    column = token_column(batch, name)
    if column is None:
        raise DataError(f"the mini-batch is missing {name}, which {why} needs")
    return column


class TokenMeans:
    """Means, maxima and effective sample sizes of per-token numbers, over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, ...]] = {}
        """Sum and number of tokens; of importance weights their sum, summed squares and number."""
        self._largest: dict[str, float] = {}

    def add(self, name: str, value_M: Tensor) -> None:
        self._add(name, (float(value_M.detach().double().sum()), value_M.numel()))

    def add_max(self, name: str, value_M: Tensor) -> None:
        if value_M.numel():
            largest = float(value_M.detach().max())
            self._largest[name] = max(self._largest.get(name, largest), largest)

    def add_weights(self, name: str, log_M: Tensor) -> None:
        """Count these importance weights, given as logarithms, into the effective sample size `name`."""
        weight_M = log_M.detach().double().clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
        self._add(name, (float(weight_M.sum()), float(weight_M.square().sum()), weight_M.numel()))

    def _add(self, name: str, sums: tuple[float, ...]) -> None:
        before = self._sums.get(name, (0.0,) * len(sums))
        self._sums[name] = tuple(a + b for a, b in zip(before, sums, strict=True))

    def merge(self, other: TokenMeans) -> None:
        for name, sums in other._sums.items():
            self._add(name, sums)
        for name, largest in other._largest.items():
            self._largest[name] = max(self._largest.get(name, largest), largest)

    def result(self) -> dict[str, float]:
        """Return the metrics that have tokens."""
        means = {}
        for name, (total, *squares, count) in self._sums.items():
            if count:
                means[name] = total**2 / (count * squares[0]) if squares else total / count
        return means | self._largest


class RouterLoad:
    """Which experts the input tokens of an update took, over micro-batches. Tokens that rows share count as
    often as they are computed."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._taken_LX = torch.zeros((), dtype=torch.int64)
        self._choices = self._replayed = 0
        self._moved = 0.0

    def add(self, experts_NLE: Tensor, moved: float | None = None) -> None:
        """Count these tokens. `moved` is the share of (token, layer) that chose others, if replayed."""
        tokens, layers, each = experts_NLE.shape
        number_NLE = experts_NLE + self.experts * torch.arange(layers, device=experts_NLE.device)[:, None]
        taken = torch.bincount(number_NLE.flatten(), minlength=layers * self.experts).cpu()
        self._taken_LX = self._taken_LX + taken.view(layers, self.experts)
        self._choices += tokens * each
        if moved is not None:
            self._moved += moved * tokens
            self._replayed += tokens

    def merge(self, other: RouterLoad) -> None:
        self._taken_LX = self._taken_LX + other._taken_LX
        self._choices += other._choices
        self._moved += other._moved
        self._replayed += other._replayed

    def result(self) -> dict[str, float]:
        if not self._choices:
            return {}
        metrics = {
            "router_load_max": float(self._taken_LX.max()) * self.experts / self._choices,
            "router_unused": float((self._taken_LX == 0).double().mean()),
        }
        if self._replayed:
            metrics["router_moved"] = self._moved / self._replayed
        return metrics


class TeacherSums:
    """Sums of per-token numbers by group of rows, in double precision: the ledger is made from them."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = defaultdict(int)
        self.sums: dict[int, dict[str, float]] = {}

    def add(self, group_M: Tensor, **numbers_M: Tensor | None) -> None:
        """Count these tokens, without numbers that are None."""
        group_M = group_M.cpu()
        counts = torch.bincount(group_M).tolist()
        columns = {name: x.detach().double().cpu() for name, x in numbers_M.items() if x is not None}
        summed = {name: torch.bincount(group_M, weights=x).tolist() for name, x in columns.items()}
        for group, count in enumerate(counts):
            if count:
                self._add(group, count, {name: values[group] for name, values in summed.items()})

    def merge(self, other: TeacherSums) -> None:
        for group, numbers in other.sums.items():
            self._add(group, other.tokens[group], numbers)

    def _add(self, group: int, count: int, numbers: dict[str, float]) -> None:
        self.tokens[group] += count
        sums = self.sums.setdefault(group, {})
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + value


class UpdateTrace:
    """The numbers of the loss for each token of the recorded rows, filled micro-batch by micro-batch."""

    def __init__(self, recorded: Sequence[bool], lengths: Sequence[int]) -> None:
        self.lengths = [length for length, kept in zip(lengths, recorded, strict=True) if kept]
        self.recorded_M = per_token([int(kept) for kept in recorded], lengths).bool()
        self.total = 0.0
        """Summed absolute losses of all tokens, over all ranks."""
        self._place_M = self.recorded_M.cumsum(0) - 1
        self._columns: dict[str, Tensor] = {}
        self._rules: dict[str, Tensor] = {}

    def add(
        self, column_M: Tensor, numbers_M: Mapping[str, Tensor | None], rules_M: Mapping[str, Tensor]
    ) -> None:
        """Keep numbers of the tokens at these positions of the mini-batch, except those that are None."""
        mine = self.recorded_M[column_M]
        for name, value_M in numbers_M.items():
            if value_M is not None:
                self._set(name, column_M, value_M.detach().cpu()[mine])
        for rule, held_M in rules_M.items():
            held = self._rules.setdefault(rule, torch.zeros(sum(self.lengths), dtype=torch.bool))
            held[self._place_M[column_M[mine]]] = held_M.detach().cpu()[mine].bool()

    def add_top(self, column_M: Tensor, prefix: str, top: tuple[Tensor, ...]) -> None:
        """Keep the most likely tokens and their logprobs. `top` has the recorded tokens of a micro-batch."""
        for name, value_MK in zip(("ids", "logprobs"), top, strict=True):
            self._set(f"{prefix}_topk_{name}", column_M, value_MK.detach().cpu())

    def _set(self, name: str, column_M: Tensor, values: Tensor) -> None:
        assert name in TRACED, name
        if name not in self._columns:
            empty, dtype = (torch.nan, torch.float32) if values.is_floating_point() else (-1, torch.int64)
            self._columns[name] = torch.full((sum(self.lengths), *values.shape[1:]), empty, dtype=dtype)
        places = self._place_M[column_M[self.recorded_M[column_M]]]
        self._columns[name][places] = values.to(self._columns[name].dtype)

    def columns(self) -> dict[str, Column]:
        """Return the columns of the recorded rows, and as `rules` the places where each rule held."""
        found = dict(self._columns)
        if self.total and "loss" in found:
            found["share"] = found["loss"].abs() / self.total
        columns: dict[str, Column] = {name: Ragged.packed(x, self.lengths) for name, x in found.items()}
        columns["rules"] = places_by_rule(self._rules, self.lengths)
        return columns


def places_by_rule(rules_N: Mapping[str, Tensor], lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """Return for each row the positions of the tokens that each rule applied to, if any."""
    rows: list[dict[str, list[int]]] = [{} for _ in lengths]
    for rule, held_N in rules_N.items():
        for i, row in enumerate(Ragged.packed(held_N, lengths).rows):
            if row.any():
                rows[i][rule] = row.nonzero().squeeze(1).tolist()
    return rows
