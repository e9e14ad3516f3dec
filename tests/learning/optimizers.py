"""An optimizer for tests that compare weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from practicum.learning.optimizer import make_adamw
from practicum.recipe.schema.recipe import Train

STEADY_EPS = 1e-3


def steady(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """Return AdamW with an epsilon that keeps it from blowing up the rounding of gradients near 0."""
    optimizer = make_adamw(parameters, train)
    for group in optimizer.param_groups:
        group["eps"] = STEADY_EPS
    return optimizer
