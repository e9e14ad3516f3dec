"""The critic of PPO: a copy of the student's trunk with a scalar head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.algorithms.losses import value_loss
from practicum.dataplane.ragged import Ragged
from practicum.learning.learner_checkpoint import TrainedModel
from practicum.learning.optimizer import Metrics, lr_at, stop_on_nonfinite
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import Packed, RowExtras, RowSpans
from practicum.learning.parallel import Parallel
from practicum.learning.update_batch import CriticBatch, TokenMeans, need_column
from practicum.models.lora import copy_on_base
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train

VALUE_CLIP = 0.2
"""Clip range of the value loss."""


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
    ) -> None:
        """Copy the student's trunk, with a new adapter on the same base if the student has one.

        The head starts at zero, and so do the values. On several ranks, make it before the student's learner,
        which leaves only a shard of the student.
        """
        base = copy_on_base(student.base_model)
        assert isinstance(base, PreTrainedModel)
        self.recipe = critic
        width = base.config.get_text_config().hidden_size
        dtype = torch.promote_types(base.dtype, torch.float32)
        self.head = nn.Linear(
            width, 1, dtype=dtype, device="cpu" if base.device.type == "meta" else base.device
        )
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trunk = PackedModel(base, train, parallel, self.head)
        self.model = nn.ModuleDict({"base": base, "head": self.head})
        super().__init__(self.model, train, parallel, on_nonfinite)

    def _values(self, packed: Packed) -> Tensor:
        with self.trunk.precision():
            hidden_M = self.trunk.hidden(packed)
        return self.head(hidden_M.to(self.trunk.dtype)).squeeze(-1)

    @torch.no_grad()
    def values(self, prompt_ids: Ragged, response_ids: Ragged, *, extras: RowExtras | None = None) -> Ragged:
        """Return the value of the state before each response token."""
        rows = RowSpans(prompt_ids, response_ids, _own_routing(extras))
        values_M = torch.empty(sum(response_ids.lengths))
        for attempt in self.trunk.attempts():
            with attempt:
                for packed in self.trunk.microbatches(rows):
                    values_M[packed.column_M] = self._values(packed).float().cpu()
        return Ragged.packed(values_M, response_ids.lengths)

    def update(self, batch: CriticBatch, *, step: int = 1) -> Metrics:
        """Make an optimizer step towards the returns, averaged over the mini-batch's sampled tokens."""
        rows = RowSpans(batch.prompt_ids, batch.response_ids, _own_routing(batch.extras))
        sampled_M = need_column(batch, "response_mask", "every update").bool()
        values_M, returns_M = (
            need_column(batch, name, "the critic").to(self.trunk.dtype) for name in ("values", "returns")
        )
        assert (self.parallel is None) == (batch.whole_tokens is None), "ranks know the whole mini-batch"
        tokens = int(sampled_M.sum()) if batch.whole_tokens is None else batch.whole_tokens
        if not tokens:
            return {"tokens": 0.0}

        report = _ValueReport((returns_M - values_M)[sampled_M], returns_M[sampled_M])
        for attempt in self.trunk.attempts():
            with attempt, self.trunk.training():
                self.stepper.optimizer.zero_grad(set_to_none=True)
                report.means = TokenMeans()
                for packed in self.trunk.microbatches(rows, sampled_M=sampled_M):
                    old_M, wanted_M = (x_M[packed.column_M] for x_M in (values_M, returns_M))
                    loss = self._loss(packed, old_M, wanted_M, report.means) / tokens
                    self.trunk.backward(loss, packed)
        self.stepper.zero_missing_grads()
        # The student's schedule, scaled to the critic's peak.
        lr = lr_at(step, self.train) * self.recipe.lr / self.train.lr
        return self.apply(self.join(report), lr)

    def _loss(self, packed: Packed, old_M: Tensor, returns_M: Tensor, means: TokenMeans) -> Tensor:
        values_M = self._values(packed)
        old_M, returns_M = old_M.to(values_M.device), returns_M.to(values_M.device)
        loss_M, clipped_M = value_loss(values_M, old_M, returns_M, VALUE_CLIP)
        means.add("value_loss", loss_M)
        means.add("value_mean", old_M)
        means.add("value_clipped", clipped_M)
        return loss_M.sum()


def _own_routing(extras: RowExtras | None) -> RowExtras | None:
    """Return the batch without recorded experts, because the critic's routers choose their own."""
    return None if extras is None else replace(extras, routed_experts=None)


@dataclass(slots=True)
class _ValueReport:
    """Measurements of an update, over micro-batches and ranks."""

    errors_M: Tensor
    """returns - values, before the update."""
    returns_M: Tensor
    means: TokenMeans = field(default_factory=TokenMeans)

    def merge(self, other: _ValueReport) -> None:
        self.errors_M = torch.cat([self.errors_M, other.errors_M])
        self.returns_M = torch.cat([self.returns_M, other.returns_M])
        self.means.merge(other.means)

    def result(self) -> Metrics:
        metrics = {"tokens": float(len(self.returns_M))} | self.means.result()
        errors, returns = (
            float((x_M - x_M.mean()).square().sum())
            for x_M in (self.errors_M.double(), self.returns_M.double())
        )
        if returns > 0.0:
            metrics["explained_variance"] = 1.0 - errors / returns
        return metrics | {"loss": metrics["value_loss"]}
