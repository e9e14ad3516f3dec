"""AdamW with moments of 8 bits, by bitsandbytes: a quarter of their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from practicum.errors import MissingExtraError, RecipeError
from practicum.recipe.schema.recipe import Train

BLOCK = 256
"""Numbers that share one scale."""
SMALLEST = 4096
"""Parameters with fewer numbers have moments in float32, as in bitsandbytes' own optimizers."""


class AdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' update of 8-bit moments; parameters of 16 bits have float32 master weights."""

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        try:
            from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise
        except ImportError:
            raise MissingExtraError("train.optimizer: adamw_8bit", "8bit") from None
        self._update = optimizer_update_8bit_blockwise
        self._maps = [create_dynamic_map(signed=signed) for signed in (True, False)]
        super().__init__(groups, {"lr": train.lr, "betas": train.betas, "eps": train.eps})
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(isinstance(p, DTensor) for p in parameters):
            raise RecipeError("train.optimizer", "adamw_8bit on several ranks", "adamw")
        if any(p.itemsize > 4 for p in parameters):
            raise RecipeError("train.optimizer", "adamw_8bit with model.dtype float64", "adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step, one parameter after the other."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p] or self._begin(p)
                weight, grad = state.get("master", p), p.grad.to(torch.float32).contiguous()
                if "absmax1" in state:
                    self._step_8bit(weight, grad, state, group)
                else:
                    _step_float32(weight, grad, state, group)
                if "master" in state:
                    p.copy_(weight)

    def _begin(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter before its first step."""
        state = self.state[p]
        state["step"] = torch.zeros((), device=p.device)
        if p.itemsize < 4:
            state["master"] = p.detach().float()
        small = p.numel() < SMALLEST
        for number in (1, 2):
            state[f"state{number}"] = torch.zeros_like(
                p, dtype=torch.float32 if small else torch.uint8, memory_format=torch.contiguous_format
            )
            if not small:
                state[f"absmax{number}"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        return state

    def _step_8bit(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self._maps = [each.to(weight.device) for each in self._maps]
        state["step"] += 1
        beta1, beta2 = group["betas"]
        signed_map, unsigned_map = self._maps
        self._update(
            "adam",
            g=grad,
            p=weight,
            state1=state["state1"],
            state2=state["state2"],
            beta1=beta1,
            beta2=beta2,
            beta3=0.0,  # this and alpha are for other optimizers
            alpha=0.0,
            eps=group["eps"],
            step=int(state["step"]),
            lr=group["lr"],
            qmap1=signed_map,
            qmap2=unsigned_map,
            absmax1=state["absmax1"],
            absmax2=state["absmax2"],
            weight_decay=group["weight_decay"],
        )


def _step_float32(weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    adamw(
        [weight],
        [grad],
        [state["state1"]],
        [state["state2"]],
        [],
        [state["step"]],
        foreach=False,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
