"""What an update did to single tokens: the very numbers of its loss, of those rows that are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from practicum.dataplane.ragged import Column, Ragged
from practicum.learning.update_batch import per_token
from practicum.records.record_files import TRACED

TOP = 8
"""The student's most likely tokens that are kept, beside a teacher's."""


class UpdateTrace:
    """Columns of the recorded rows of a mini-batch, filled micro-batch by micro-batch."""

    def __init__(self, recorded: Sequence[bool], lengths: Sequence[int]) -> None:
        self.lengths = [length for length, kept in zip(lengths, recorded, strict=True) if kept]
        self.recorded_M = per_token([int(kept) for kept in recorded], lengths).bool()
        self.total = 0.0
        """Summed sizes of the losses of all tokens, of all ranks."""
        self._place_M = self.recorded_M.cumsum(0) - 1
        self._columns: dict[str, Tensor] = {}
        self._rules: dict[str, Tensor] = {}

    def add(
        self, column_M: Tensor, numbers_M: Mapping[str, Tensor | None], rules_M: Mapping[str, Tensor]
    ) -> None:
        """Note numbers of the tokens at these places of the mini-batch; one that is None is left out."""
        column_M = column_M.cpu()
        mine = self.recorded_M[column_M]
        to = self._place_M[column_M[mine]]
        for name, value_M in numbers_M.items():
            if value_M is not None:
                self._set(name, to, value_M.detach().cpu()[mine])
        for rule, held_M in rules_M.items():
            held = self._rules.setdefault(rule, torch.zeros(sum(self.lengths), dtype=torch.bool))
            held[to] = held_M.detach().cpu()[mine].bool()

    def add_top(self, column_M: Tensor, prefix: str, top: tuple[Tensor, ...]) -> None:
        """Note the most likely tokens and their logprobs; `top` has the recorded tokens of a micro-batch."""
        column_M = column_M.cpu()
        to = self._place_M[column_M[self.recorded_M[column_M]]]
        for name, value_MK in zip(("ids", "logprobs"), top, strict=True):
            self._set(f"{prefix}_topk_{name}", to, value_MK.detach().cpu())

    def _set(self, name: str, to: Tensor, values: Tensor) -> None:
        assert name in TRACED, name
        if name not in self._columns:
            empty = torch.nan if values.is_floating_point() else -1
            dtype = torch.float32 if values.is_floating_point() else torch.int64
            self._columns[name] = torch.full((sum(self.lengths), *values.shape[1:]), empty, dtype=dtype)
        self._columns[name][to] = values.to(self._columns[name].dtype)

    def columns(self) -> dict[str, Column]:
        """The columns of the recorded rows, and by `rules` where each rule held."""
        found = dict(self._columns)
        if self.total and "loss" in found:
            found["share"] = found["loss"].abs() / self.total
        columns: dict[str, Column] = {name: Ragged.packed(x, self.lengths) for name, x in found.items()}
        columns["rules"] = places_by_rule(self._rules, self.lengths)
        return columns


def places_by_rule(rules_N: Mapping[str, Tensor], lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """For each row, the places of its tokens that each rule held; rules that held none are left out."""
    by_rule = {rule: Ragged.packed(held_N, lengths) for rule, held_N in rules_N.items() if held_N.any()}
    rows: list[dict[str, list[int]]] = [{} for _ in lengths]
    for rule, held in by_rule.items():
        for i, row in enumerate(held.rows):
            if row.any():
                rows[i][rule] = row.nonzero().squeeze(1).tolist()
    return rows
