"""Optimizers, learning-rate schedules, and the guarded optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from practicum.devices import has_fused_optimizers
from practicum.errors import CheckError, MissingExtraError, RecipeError
from practicum.learning.parallel import whole
from practicum.learning.update_shares import PartGradients, PartShares
from practicum.models.offloaded_weights import return_memory
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.recipe import Train

Metrics = dict[str, float]


def lr_at(step: int, train: Train) -> float:
    """Return the learning rate of a training step, counted from 1: after a linear warm-up, the schedule's."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    return float(find_part("schedule", train.schedule, SCHEDULES)(step, train))


def _decayed(shape: Callable[[float], float]) -> Callable[[int, Train], float]:
    """Return a schedule from lr to final_lr at the last step. `shape` maps the share done to that left."""

    def rate(step: int, train: Train) -> float:
        decay_steps = max(train.steps - 1 - train.warmup_steps, 1)
        done = min((step - 1 - train.warmup_steps) / decay_steps, 1.0)
        return train.final_lr + (train.lr - train.final_lr) * shape(done)

    return rate


SCHEDULES: dict[str, Callable[[int, Train], float]] = {
    "constant": lambda step, train: train.lr,
    "linear": _decayed(lambda done: 1.0 - done),
    "cosine": _decayed(lambda done: 0.5 * (1.0 + math.cos(math.pi * done))),
}
"""The learning rate of a step after the warm-up, by the schedule's name in a recipe."""

EPS = 1e-8
"""AdamW's epsilon."""

MakeOptimizer = Callable[[Iterable[nn.Parameter], Train], torch.optim.Optimizer]


def make_adamw(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """Return AdamW, fused if possible. Weight decay applies to matrices, not to norms and biases. Parameters
    of 16 bits have float32 weights beside them, to which the updates are added."""
    trained = [p for p in parameters if p.requires_grad]
    fused = all(has_fused_optimizers(p.device) for p in trained)
    return _adamw(trained, train, torch.optim.AdamW, fused=fused)


def make_adamw_8bit(parameters: Iterable[nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments. Weight decay and master weights are those of `adamw`."""
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError:
        raise MissingExtraError("train.optimizer: adamw_8bit", "8bit") from None
    return _adamw([p for p in parameters if p.requires_grad], train, AdamW8bit)


def _adamw(
    trained: list[nn.Parameter], train: Train, kind: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options |= {"lr": train.lr, "betas": train.betas, "eps": EPS}
    if any(p.itemsize < 4 for p in trained):
        return MasterWeights(groups, kind, options)
    return kind(groups, **options)


class MasterWeights(torch.optim.Optimizer):
    """Runs an optimizer on float32 copies of its parameters, which are rounded from them. In bfloat16 itself,
    an update of less than about 1/256 of a weight would be rounded away."""

    def __init__(
        self, groups: list[dict[str, Any]], kind: type[torch.optim.Optimizer], options: dict[str, Any]
    ) -> None:
        self._kind, self._options = kind, options
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step one parameter at a time, so that only its gradient has a float32 copy."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                master = nn.Parameter(state.pop("master") if state else p.detach().float())
                settings = self._options | {"lr": group["lr"], "weight_decay": group["weight_decay"]}
                optimizer = self._kind([master], **settings)
                if state:
                    optimizer.state[master] = state
                master.grad = p.grad.float()
                optimizer.step()
                self.state[p] = {**optimizer.state[master], "master": master.detach()}
                p.copy_(master)


OPTIMIZERS: dict[str, MakeOptimizer] = {"adamw": make_adamw, "adamw_8bit": make_adamw_8bit}
"""By their names in a recipe."""


def stop_on_nonfinite(what: str) -> None:
    """Raise a CheckError for a loss or gradient that is not finite."""
    raise CheckError(f"{what}; the optimizer step was skipped and the weights are unchanged")


class OptimizerStepper:
    """The optimizer of one model, with clipping and checks of its step."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        train: Train,
        on_nonfinite: Callable[[str], None] = stop_on_nonfinite,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = find_part("optimizer", train.optimizer, OPTIMIZERS)(self.parameters, train)
        self._offloads = train.offload == "host" and bool(self.parameters)
        if self._offloads and self.parameters[0].device.type == "cpu":
            found = "host with the model on the CPU, whose memory is the host's"
            raise RecipeError("train.offload", found, "none")
        self.max_grad_norm = math.inf if train.max_grad_norm is None else train.max_grad_norm
        self.on_nonfinite = on_nonfinite
        self.shares: PartShares | None = None
        self.begun = 0
        """Optimizer steps that were begun, also those that failed half-way."""

    def step(
        self,
        lr: float,
        metrics: Metrics,
        before_step: Callable[[Metrics], None] | None = None,
        parts: PartGradients | None = None,
    ) -> bool:
        """Make an optimizer step with the parameters' gradients. Add grad_norm and lr to `metrics`.

        With `parts`, the gradients' parts, `shares` has what each had of the step.

        Calls `on_nonfinite` for a non-finite loss or gradient, and then does not step (False). Calls
        `before_step` with the metrics first: if it raises, nothing has changed.
        """
        self.shares = None
        try:
            norm = whole(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            metrics |= {"grad_norm": float(norm), "lr": lr}
            bad = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
            if bad:
                numbers = " and ".join(f"{name} is {metrics[name]}" for name in bad)
                self.on_nonfinite(f"update of {int(metrics['tokens'])} tokens: {numbers}")
                return False
            if before_step is not None:
                before_step(metrics)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.begun += 1
            with self.state_in_place():
                if parts is not None:
                    parts.begin_step(self.optimizer)
                self.optimizer.step()
                if parts is not None:
                    clip = min(1.0, self.max_grad_norm / (float(norm) + 1e-6))  # as torch clips
                    self.shares = parts.end_step(self.optimizer, lr, clip)
            return True
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def state_in_place(self) -> Iterator[None]:
        """Context manager in which the optimizer's state is on the device, also if it is offloaded."""
        if not self._offloads:
            yield
            return
        device = self.parameters[0].device
        self._move_state(device)
        try:
            yield
        finally:
            self._move_state(torch.device("cpu"))
            return_memory(device)

    def _move_state(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = value.to(device)

    def zero_missing_grads(self) -> None:
        """Set gradients to zero where no backward pass ran, so that the optimizer steps all the same."""
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
