"""The critic of PPO: a copy of the student's trunk with a scalar head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.algorithms.values import value_loss
from practicum.dataplane.ragged import Ragged
from practicum.learning.batch import CriticBatch, need_column
from practicum.learning.extras import RowExtras
from practicum.learning.metrics import TokenMeans
from practicum.learning.optim import Metrics, Stepper, lr_at, stop_on_nonfinite
from practicum.learning.packing import Packed, Rows
from practicum.learning.parts import Counters, load_parts, save_parts
from practicum.learning.trunk import Trunk
from practicum.recipe.schema import Critic as CriticRecipe
from practicum.recipe.schema import Train


class Critic:
    """Values before each response token. `step` is the schedule's training step: the trainer sets it."""

    def __init__(
        self,
        student: PreTrainedModel,
        train: Train,
        critic: CriticRecipe,
        *,
        on_nonfinite: Callable[[str], None] = stop_on_nonfinite,
        before_step: Callable[[Metrics], None] | None = None,
    ) -> None:
        """Starts as a copy of the student's trunk; the head starts at zero, and so do the values."""
        base = copy.deepcopy(student.base_model)
        assert isinstance(base, PreTrainedModel)
        self.train, self.recipe = train, critic
        self.version = 0
        self.step = 0
        self.trunk = Trunk(base, train)
        width = base.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, dtype=self.trunk.dtype, device=base.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.model = nn.ModuleDict({"base": base, "head": self.head})
        self.stepper = Stepper(
            self.model.parameters(), train, on_nonfinite=on_nonfinite, before_step=before_step
        )

    def _values(self, packed: Packed) -> Tensor:
        with self.trunk.precision():
            hidden_M = self.trunk.hidden(packed)
        return self.head(hidden_M.to(self.trunk.dtype)).squeeze(-1)

    @torch.no_grad()
    def values(self, prompt_ids: Ragged, response_ids: Ragged, *, extras: RowExtras | None = None) -> Ragged:
        """The value of the state before each response token."""
        rows = _rows(prompt_ids, response_ids, extras)
        values_M = torch.empty(sum(response_ids.lengths))
        for packed in self.trunk.microbatches(rows):
            values_M[packed.column_M] = self._values(packed).float().cpu()
        return Ragged.packed(values_M, response_ids.lengths)

    def update(self, batch: CriticBatch) -> Metrics:
        """One optimizer step towards the returns, averaged over the mini-batch's sampled tokens."""
        rows = _rows(batch.prompt_ids, batch.response_ids, batch.extras)
        sampled_M = need_column(batch, "response_mask", "every update").bool()
        values_M, returns_M = (
            need_column(batch, name, "the critic").to(self.trunk.dtype) for name in ("values", "returns")
        )
        tokens = int(sampled_M.sum())
        metrics: Metrics = {"tokens": float(tokens)}
        if not tokens:
            return metrics
        means = TokenMeans()
        with self.trunk.training():
            for packed in self.trunk.microbatches(rows, sampled_M=sampled_M):
                old, wanted = (x_M[packed.column_M] for x_M in (values_M, returns_M))
                self._add(packed, old, wanted, tokens, means)
        self.stepper.zero_missing_grads()
        metrics |= means.result() | _explained(values_M[sampled_M], returns_M[sampled_M])
        metrics["loss"] = metrics["value_loss"]
        if self.stepper.step(self._lr(), metrics):
            self.version += 1
        return metrics

    def _add(self, packed: Packed, old_M: Tensor, returns_M: Tensor, tokens: int, means: TokenMeans) -> None:
        """Forward and backward of one micro-batch."""
        values_M = self._values(packed)
        old_M, returns_M = old_M.to(values_M.device), returns_M.to(values_M.device)
        every_M = torch.ones_like(values_M, dtype=torch.bool)
        terms = value_loss(values_M, old_M, returns_M, every_M, self.recipe.clip)
        self.trunk.backward(terms.loss_N.sum() / tokens, packed)
        means.add("value_loss", terms.loss_N)
        means.add("value_mean", old_M)
        if self.recipe.clip is not None:
            means.add("value_clipped", terms.stats_N["value_clipped"])

    def _lr(self) -> float:
        """The student's schedule, scaled to the critic's peak."""
        return lr_at(self.step, self.train) * self.recipe.lr / self.train.lr

    def save(self, folder: Path) -> None:
        """Write model.safetensors, optimizer.pt and critic.json, for a bit-exact continuation."""
        counters = Counters(version=self.version, step=self.step)
        save_parts(folder, "critic", self.model, self.stepper, counters)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        counters = load_parts(folder, "critic", self.model, self.stepper)
        self.version, self.step = counters.version, counters.step


def _rows(prompt_ids: Ragged, response_ids: Ragged, extras: RowExtras | None) -> Rows:
    """The rows for a model that is not the one that sampled them, and so routes by itself."""
    return Rows(prompt_ids, response_ids, extras.own_routing() if extras is not None else None)


def _explained(values_M: Tensor, returns_M: Tensor) -> Metrics:
    spread = float(returns_M.var(unbiased=False))
    if spread == 0.0:
        return {}
    left = float((returns_M - values_M).var(unbiased=False))
    return {"explained_variance": 1.0 - left / spread}
