"""Optimizers, learning-rate schedules, and the guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from practicum.devices import has_fused_optimizers
from practicum.errors import CheckError, RecipeError
from practicum.learning.adamw_8bit import AdamW8bit
from practicum.learning.offloaded_state import OffloadedState
from practicum.learning.parallel import whole
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.recipe import Train

Metrics = dict[str, float]


def lr_at(step: int, train: Train) -> float:
    """Learning rate of training step `step`, counted from 0.

    Grows linearly over the warm-up steps, then follows the schedule.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    return float(find_part("schedule", train.schedule, SCHEDULES)(step, train))


def _constant(step: int, train: Train) -> float:
    return train.lr


def _linear(step: int, train: Train) -> float:
    return _decayed(train, 1.0 - _done(step, train))


def _cosine(step: int, train: Train) -> float:
    return _decayed(train, 0.5 * (1.0 + math.cos(math.pi * _done(step, train))))


def _done(step: int, train: Train) -> float:
    """Share of the decay that is done at step `step`; 1 from the last step on."""
    decay_steps = max(train.steps - 1 - train.warmup_steps, 1)
    return min((step - train.warmup_steps) / decay_steps, 1.0)


def _decayed(train: Train, left: float) -> float:
    return train.final_lr + (train.lr - train.final_lr) * left


SCHEDULES: dict[str, Callable[[int, Train], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
"""The learning rate of a step after the warm-up, by the name that a recipe gives the schedule."""


def make_adamw(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """AdamW, fused where torch can; weight decay acts on matrices, not on norms and biases.

    Parameters of 16 bits have float32 weights beside them, to which the updates are added.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = _decay_groups(trained, train)
    fused = all(has_fused_optimizers(p.device) for p in trained)
    if any(p.itemsize < 4 for p in trained):
        return MasterAdamW(groups, train, fused=fused)
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=fused)


def make_adamw_8bit(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits; weight decay and master weights as above."""
    return AdamW8bit(_decay_groups([p for p in parameters if p.requires_grad], train), train)


def _decay_groups(trained: list[nn.Parameter], train: Train) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on float32 master weights, which the parameters are rounded from.

    In bfloat16 itself, an update of less than about 1/256 of a weight would be rounded away.
    """

    def __init__(self, groups: list[dict[str, Any]], train: Train, *, fused: bool) -> None:
        self._fused = fused
        super().__init__(groups, {"lr": train.lr, "betas": train.betas, "eps": train.eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; one parameter at a time, so that only its gradient has a float32 copy."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["step"] = torch.zeros((), device=p.device)
                    state |= {name: torch.zeros_like(state["master"]) for name in ("exp_avg", "exp_avg_sq")}
                adamw(
                    [state["master"]],
                    [p.grad.float()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    foreach=False,
                    fused=self._fused,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                p.copy_(state["master"])


MakeOptimizer = Callable[[Iterable[nn.Parameter], Train], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": make_adamw, "adamw_8bit": make_adamw_8bit}
"""By the name that a recipe gives them."""


def _offloaded(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], train: Train
) -> OffloadedState | None:
    if train.offload == "none" or not parameters:
        return None
    device = parameters[0].device
    if train.offload == "host" and device.type == "cpu":
        found = "host with the model on the CPU, whose memory is the host's"
        raise RecipeError("train.offload", found, "disk or none")
    return OffloadedState(optimizer, train.offload, device)


def stop_on_nonfinite(what: str) -> None:
    """The default answer to a loss or gradient that is not finite."""
    raise CheckError(f"{what}; the optimizer was not called and the weights are as before")


class OptimizerStepper:
    """The optimizer of one model, and what guards its step."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        train: Train,
        on_nonfinite: Callable[[str], None] = stop_on_nonfinite,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = find_part("optimizer", train.optimizer, OPTIMIZERS)(self.parameters, train)
        self._offloaded = _offloaded(self.optimizer, self.parameters, train)
        self.clip_norm = math.inf if train.clip_norm is None else train.clip_norm
        self.on_nonfinite = on_nonfinite
        self.before_step: Callable[[Metrics], None] | None = None
        self.begun = 0
        """Optimizer steps that were begun, also those that failed half-way."""

    def step(self, lr: float, metrics: Metrics) -> bool:
        """Apply the gradients that lie on the parameters; adds grad_norm and lr to `metrics`.

        Calls `on_nonfinite` for a non-finite loss or gradient, and then does not step (False). Calls
        `before_step` with the metrics first: if it raises, nothing has changed.
        """
        try:
            norm = self._norm()
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
            metrics |= {"grad_norm": float(norm), "lr": lr}
            bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
            if bad:
                numbers = " and ".join(f"{name} is {metrics[name]}" for name in bad)
                self.on_nonfinite(f"update of {int(metrics['tokens'])} tokens: {numbers}")
                return False
            if self.before_step is not None:
                self.before_step(metrics)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.begun += 1
            with self.state_in_place():
                self.optimizer.step()
            return True
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def state_in_place(self) -> Iterator[None]:
        """Inside, the optimizer has its state; outside it may be offloaded."""
        if self._offloaded is None:
            yield
            return
        self._offloaded.restore()
        try:
            yield
        finally:
            self._offloaded.take()

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has made a step."""
        return bool(self.optimizer.state)

    def take_norm(self) -> float:
        """Global norm of the gradients that lie on the parameters, which are removed."""
        norm = float(self._norm())
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _norm(self) -> Tensor:
        return whole(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))

    def zero_missing_grads(self) -> None:
        """A gradient of zeros where no backward pass ran: the optimizer then steps all the same."""
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
