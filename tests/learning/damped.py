"""AdamW with a large epsilon: it does not magnify the rounding of tiny gradients in runs to compare."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from practicum.recipe.schema.recipe import Train


def damped_adamw(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=train.lr, betas=train.betas, eps=1e-3, weight_decay=0.0)
