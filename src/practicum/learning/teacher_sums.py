"""Sums over the tokens of each group of rows: what the ledger of teachers and domains is made from."""

from __future__ import annotations

import torch
from torch import Tensor


class TeacherSums:
    """Sums of per-token numbers by group, in double precision, over micro-batches."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.sums: dict[int, dict[str, float]] = {}

    def add(self, group_M: Tensor, **numbers_M: Tensor | None) -> None:
        """Count these tokens; a number that is None is left out."""
        group_M = group_M.cpu()
        counts = torch.bincount(group_M).tolist()
        given = {name: x.detach().double().cpu() for name, x in numbers_M.items() if x is not None}
        summed = {name: torch.bincount(group_M, weights=x).tolist() for name, x in given.items()}
        for group, count in enumerate(counts):
            if count:
                self.tokens[group] = self.tokens.get(group, 0) + count
                mine = self.sums.setdefault(group, {})
                for name, values in summed.items():
                    mine[name] = mine.get(name, 0.0) + values[group]

    def merge(self, other: TeacherSums) -> None:
        """Add what another one counted."""
        for group, count in other.tokens.items():
            self.tokens[group] = self.tokens.get(group, 0) + count
        for group, numbers in other.sums.items():
            mine = self.sums.setdefault(group, {})
            for name, value in numbers.items():
                mine[name] = mine.get(name, 0.0) + value
