"""What an update reports: the one table of names, and means over sampled tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

METRICS: dict[str, str] = {
    "loss": "what was minimised: the aggregated loss with its penalties",
    "tokens": "sampled tokens in the mini-batch",
    "idle_tokens": "share of them in sessions whose gradient is surely zero (no backward pass)",
    "policy_loss": "the policy's part of the loss, aggregated",
    "distill_loss": "divergence from the teachers, mean over tokens, before its weight",
    "distill_clamped": "share of tokens held by distill.clamp",
    "teacher_kl": "k1 estimate of KL(student || teacher): mean of the sampled tokens' log-ratios",
    "teacher_overlap": "share of the teacher's top-k that is in the student's own",
    "teacher_entropy_gap": "entropy of the student minus the teacher's, over what the signal compares",
    "entropy": "of the student at the sampling temperature",
    "ratio": "importance ratio of the student to the ratio's denominator",
    "approx_kl": "k3 estimate of KL(old || student)",
    "clipped_low": "share of tokens held by the lower clip",
    "clipped_high": "share of tokens held by the upper clip",
    "dual_clipped": "share of tokens held by the dual clip",
    "log_ratio_clamped": "share of tokens whose log-ratio was clamped",
    "kl": "estimate of KL(student || reference), if it is in the loss",
    "kl_clamped": "share of tokens whose log-ratio to the reference was clamped",
    "gap_mean": "mean |learner - rollout| logprob on fresh rows, at the sampling temperature (1 if cut)",
    "gap_max": "largest such difference",
    "gap_k3": "k3 estimate of KL(rollout || learner) from them (unbiased if nothing is cut)",
    "sample_size": "effective sample size of stale rows' ratios to the engine, as a fraction of tokens",
    "grad_norm": "global norm of the gradient before clipping",
    "lr": "learning rate",
    "microbatch_halved": "how often micro-batches were halved because memory ran out; absent if never",
    "router_load_max": "load of the busiest expert of any layer, as a multiple of an even load",
    "router_unused": "share of the experts of all layers that no token took",
    "router_moved": "share of (token, layer) whose router would choose other experts than those replayed",
    "value_loss": "the critic's loss",
    "value_clipped": "share of tokens held by the value clip",
    "value_mean": "the critic's value before the update",
    "explained_variance": "1 - var(returns - values) / var(returns), before the update",
}
"""Means are over sampled tokens, those of routers over input tokens, never padding; a metric without tokens
is absent."""


_LARGEST_LOG = 100.0
"""Importance weights beyond this are as bad as any; squares of larger ones would overflow."""


class TokenMeans:
    """Sums of per-token numbers over micro-batches, in double precision."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._largest: dict[str, float] = {}
        self._weights: dict[str, tuple[float, float, int]] = {}
        """Summed importance weights, their summed squares, and their number."""

    def add(self, name: str, value_M: Tensor) -> None:
        """Count these tokens into the mean of `name`."""
        assert name in METRICS, name
        self._sums[name] += float(value_M.detach().double().sum())
        self._counts[name] += value_M.numel()

    def add_max(self, name: str, value_M: Tensor) -> None:
        """Count these tokens into the maximum of `name`."""
        assert name in METRICS, name
        if value_M.numel():
            largest = float(value_M.detach().max())
            self._largest[name] = max(self._largest.get(name, largest), largest)

    def add_weights(self, name: str, log_M: Tensor) -> None:
        """Count these importance weights, given as logarithms, into the effective sample size `name`."""
        assert name in METRICS, name
        weight_M = log_M.detach().double().clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
        sums = float(weight_M.sum()), float(weight_M.square().sum()), weight_M.numel()
        self._add_weights(name, sums)

    def _add_weights(self, name: str, sums: tuple[float, float, int]) -> None:
        total, squares, count = self._weights.get(name, (0.0, 0.0, 0))
        self._weights[name] = total + sums[0], squares + sums[1], count + sums[2]

    def merge(self, other: TokenMeans) -> None:
        """Add what another one counted."""
        for name, sums in other._weights.items():
            self._add_weights(name, sums)
        for name, count in other._counts.items():
            self._sums[name] += other._sums[name]
            self._counts[name] += count
        for name, largest in other._largest.items():
            self._largest[name] = max(self._largest.get(name, largest), largest)

    def result(self) -> dict[str, float]:
        """Means and maxima of what was counted."""
        means = {name: self._sums[name] / n for name, n in self._counts.items() if n}
        sizes = {name: total**2 / (n * squares) for name, (total, squares, n) in self._weights.items() if n}
        return means | self._largest | sizes


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers, their mean and their summed squared distance from it, in double precision."""

    count: int
    mean: float
    squares: float

    @staticmethod
    def of(value_M: Tensor) -> Moments:
        """Those of these numbers."""
        value_M = value_M.detach().double()
        if not value_M.numel():
            return Moments(0, 0.0, 0.0)
        mean = value_M.mean()
        return Moments(value_M.numel(), float(mean), float((value_M - mean).square().sum()))

    def __add__(self, other: Moments) -> Moments:
        """Those of both together (Chan et al. 1979)."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return Moments(count, mean, squares)


class RouterLoad:
    """Which experts the input tokens of an update took, over micro-batches.

    A prompt that rows share counts as often as it is computed.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._taken_LX = torch.zeros(0, experts, dtype=torch.int64)
        self._choices = 0
        self._moved = 0.0
        self._replayed = 0

    def add(self, experts_NLE: Tensor, moved: float | None = None) -> None:
        """Count these tokens; `moved` is the share of (token, layer) that chose others, if replayed."""
        tokens, layers, each = experts_NLE.shape
        number_NLE = experts_NLE + self.experts * torch.arange(layers, device=experts_NLE.device)[:, None]
        taken = torch.bincount(number_NLE.flatten(), minlength=layers * self.experts).cpu()
        taken_LX = taken.view(layers, self.experts)
        self._taken_LX = taken_LX if not self._choices else self._taken_LX + taken_LX
        self._choices += tokens * each
        if moved is not None:
            self._moved += moved * tokens
            self._replayed += tokens

    def merge(self, other: RouterLoad) -> None:
        """Add what another one counted."""
        if other._choices:
            self._taken_LX = other._taken_LX if not self._choices else self._taken_LX + other._taken_LX
            self._choices += other._choices
            self._moved += other._moved
            self._replayed += other._replayed

    def result(self) -> dict[str, float]:
        """The routers' metrics."""
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
    """Sums of per-token numbers by group of rows, in double precision, over micro-batches.

    The ledger of teachers and domains is made from them.
    """

    def __init__(self) -> None:
        self.tokens: dict[int, int] = defaultdict(int)
        self.sums: dict[int, dict[str, float]] = {}

    def add(self, group_M: Tensor, **numbers_M: Tensor | None) -> None:
        """Count these tokens; a number that is None is left out."""
        group_M = group_M.cpu()
        counts = torch.bincount(group_M).tolist()
        columns = {name: x.detach().double().cpu() for name, x in numbers_M.items() if x is not None}
        summed = {name: torch.bincount(group_M, weights=x).tolist() for name, x in columns.items()}
        for group, count in enumerate(counts):
            if count:
                self.tokens[group] += count
                self._add(group, {name: values[group] for name, values in summed.items()})

    def merge(self, other: TeacherSums) -> None:
        """Add what another one counted."""
        for group, count in other.tokens.items():
            self.tokens[group] += count
        for group, numbers in other.sums.items():
            self._add(group, numbers)

    def _add(self, group: int, numbers: dict[str, float]) -> None:
        sums = self.sums.setdefault(group, {})
        for name, value in numbers.items():
            sums[name] = sums.get(name, 0.0) + value
