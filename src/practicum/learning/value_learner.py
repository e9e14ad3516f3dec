"""The critic of PPO: a copy of the student's trunk with a scalar head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.algorithms.values import value_loss
from practicum.dataplane.ragged import Ragged
from practicum.errors import EngineError
from practicum.learning.learner_checkpoint import TrainedModel
from practicum.learning.optimizer import Metrics, lr_at, stop_on_nonfinite
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import Packed, RowExtras, RowSpans
from practicum.learning.parallel import Parallel, is_sharded
from practicum.learning.update_batch import CriticBatch, need_column
from practicum.learning.update_metrics import Moments, TokenMeans
from practicum.models.lora import copy_on_base
from practicum.models.weight_files import WeightFiles
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train


class ValueLearner(TrainedModel):
    """Values before each response token."""

    NAME = "critic"

    def __init__(
        self,
        student: PreTrainedModel,
        train: Train,
        critic: CriticRecipe,
        *,
        on_nonfinite: Callable[[str], None] = stop_on_nonfinite,
        parallel: Parallel | None = None,
        files: WeightFiles | None = None,
    ) -> None:
        """Starts as a copy of the student's trunk, with its own adapter on the same base if the student has
        one; the head starts at zero, and so do the values.

        On several ranks it is made before the student's learner, which leaves only a shard of the student.
        A student without weights has them in `files`.
        """
        if is_sharded(student):
            raise EngineError("the critic is a copy of the whole student: make it before the sharded learner")
        base = copy_on_base(student.base_model)
        assert isinstance(base, PreTrainedModel)
        self.recipe = critic
        width = base.config.get_text_config().hidden_size
        device = base.device if files is None else files.device
        self.head = nn.Linear(width, 1, dtype=torch.promote_types(base.dtype, torch.float32), device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trunk = PackedModel(base, train, parallel, self.head, files)
        self.model = nn.ModuleDict({"base": base, "head": self.head})
        super().__init__(self.model, train, parallel, on_nonfinite)

    def _values(self, packed: Packed) -> Tensor:
        with self.trunk.precision():
            hidden_M = self.trunk.hidden(packed)
        return self.head(hidden_M.to(self.trunk.dtype)).squeeze(-1)

    @torch.no_grad()
    def values(self, prompt_ids: Ragged, response_ids: Ragged, *, extras: RowExtras | None = None) -> Ragged:
        """The value of the state before each response token."""
        rows = _rows(prompt_ids, response_ids, extras)
        values_M = torch.empty(sum(response_ids.lengths))

        def estimate(packed: Packed) -> None:
            values_M[packed.column_M] = self._values(packed).float().cpu()

        self.trunk.halving(lambda: self.trunk.each(self.trunk.microbatches(rows), estimate))
        return Ragged.packed(values_M, response_ids.lengths)

    def update(self, batch: CriticBatch) -> Metrics:
        """One optimizer step towards the returns, averaged over the mini-batch's sampled tokens."""
        rows = _rows(batch.prompt_ids, batch.response_ids, batch.extras)
        sampled_M = need_column(batch, "response_mask", "every update").bool()
        values_M, returns_M = (
            need_column(batch, name, "the critic").to(self.trunk.dtype) for name in ("values", "returns")
        )
        assert (self.parallel is None) == (batch.whole_tokens is None), "ranks know the whole mini-batch"
        tokens = int(sampled_M.sum()) if batch.whole_tokens is None else batch.whole_tokens
        if not tokens:
            return {"tokens": 0.0}

        def accumulate() -> _ValueReport:
            self.stepper.optimizer.zero_grad(set_to_none=True)
            report = _ValueReport(
                left=Moments.of((returns_M - values_M)[sampled_M]), returns=Moments.of(returns_M[sampled_M])
            )

            def add(packed: Packed) -> Tensor:
                old_M, wanted_M = (x_M[packed.column_M] for x_M in (values_M, returns_M))
                return self._loss(packed, old_M, wanted_M, report.means) / tokens

            with self.trunk.training():
                self.trunk.each(self.trunk.microbatches(rows, sampled_M=sampled_M), add)
            return report

        report = self.trunk.halving(accumulate)
        self.stepper.zero_missing_grads()
        return self.apply(self.join(report), self._lr())

    def _loss(self, packed: Packed, old_M: Tensor, returns_M: Tensor, means: TokenMeans) -> Tensor:
        """Forward pass of one micro-batch: the sum of its tokens' losses."""
        values_M = self._values(packed)
        old_M, returns_M = old_M.to(values_M.device), returns_M.to(values_M.device)
        every_M = torch.ones_like(values_M, dtype=torch.bool)
        terms = value_loss(values_M, old_M, returns_M, every_M, self.recipe.clip)
        means.add("value_loss", terms.loss_N)
        means.add("value_mean", old_M)
        if self.recipe.clip is not None:
            means.add("value_clipped", terms.stats_N["value_clipped"])
        return terms.loss_N.sum()

    def _lr(self) -> float:
        """The student's schedule, scaled to the critic's peak."""
        return lr_at(self.step, self.train) * self.recipe.lr / self.train.lr


def _rows(prompt_ids: Ragged, response_ids: Ragged, extras: RowExtras | None) -> RowSpans:
    """The rows for a model that is not the one that sampled them, and so routes by itself."""
    return RowSpans(prompt_ids, response_ids, extras.own_routing() if extras is not None else None)


@dataclass(slots=True)
class _ValueReport:
    """What an update measures, over micro-batches and ranks."""

    left: Moments
    """Of returns - values, before the update."""
    returns: Moments
    means: TokenMeans = field(default_factory=TokenMeans)

    def merge(self, other: _ValueReport) -> None:
        """Add what another rank measured."""
        self.left += other.left
        self.returns += other.returns
        self.means.merge(other.means)

    def result(self) -> Metrics:
        """The metrics."""
        metrics = {"tokens": float(self.returns.count)} | self.means.result()
        if self.returns.squares > 0.0:
            metrics["explained_variance"] = 1.0 - self.left.squares / self.returns.squares
        return metrics | {"loss": metrics["value_loss"]}
