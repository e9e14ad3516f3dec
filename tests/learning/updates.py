"""Runs a learner's update and keeps what it did."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from practicum.learning.learner import Learner
from practicum.learning.optimizer import Metrics
from practicum.learning.update_batch import UpdateBatch
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import Updated


def learn(
    model: PreTrainedModel,
    batch: UpdateBatch,
    train: Train,
    algorithm: Algorithm,
    *,
    temperature: float = 1.0,
    budget: int | None = None,
    **hooks: Any,
) -> tuple[Updated, Metrics]:
    """One update of a copy of the model; gradients are after clipping."""
    learner = Learner(copy.deepcopy(model), train, algorithm, temperature=temperature, **hooks)
    if budget is not None:
        learner.trunk.token_budget = budget
    grads: dict[str, torch.Tensor] = {}

    def keep(metrics: Metrics) -> None:
        for name, p in learner.model.named_parameters():
            assert (p.grad is not None) == p.requires_grad
            if p.grad is not None:
                grads[name] = p.grad.clone()

    metrics = learner.update(batch, before_step=keep)
    weights = {name: p.detach() for name, p in learner.model.named_parameters()}
    return Updated(metrics.get("loss", 0.0), grads, weights), metrics


def assert_same(mine: Updated, theirs: Updated, tolerance: float) -> None:
    """Loss, every gradient and every weight, in parts of the largest gradient where that is above 1."""
    scale = max(1.0, max(float(g.abs().max()) for g in theirs.grads.values()))
    torch.testing.assert_close(mine.loss, theirs.loss, rtol=tolerance, atol=tolerance)
    assert mine.grads.keys() == theirs.grads.keys()
    for name, grad in theirs.grads.items():
        torch.testing.assert_close(mine.grads[name], grad, rtol=0, atol=tolerance * scale, msg=name)
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(mine.weights[name], weight, rtol=0, atol=tolerance * scale, msg=name)
