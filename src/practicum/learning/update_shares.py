"""Whose step it was: the gradients of the parts of a mini-batch, and their shares of the weights' change.

Parts (the rows of a teacher in a domain) are back-propagated one after the other, so each part's gradient g_i
is exact and costs no second pass. With d the change of the weights in AdamW's step, and v its second moment
after it:

    u_i = -lr g_i / (sqrt(v) + eps)            share_i = <u_i, d> / <d, d>
    clipping = (c - 1) sum_i share_i           c: the factor by which the global norm was clipped
    decay = <-lr weight_decay w, d> / <d, d>   w: the weights before the step
    momentum = 1 - all of these                what earlier steps' gradients add, and rounding

A share below 0 is of a part that works against the step. Under Adam a share of the gradient says little: its
coordinates are divided by sqrt(v), and a part may have most of the norm in coordinates that hardly move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Gather = Callable[[list[float]], list[list[float]]]
"""Returns these numbers of all ranks."""


@dataclass(frozen=True, slots=True)
class PartShares:
    """Of an optimizer step: dot products of the parts' gradients, and each part's share of the update.

    `shares` is empty if the optimizer has no second moments to read. `rest` is what no part has, by its name.
    """

    gram: list[list[float]]
    shares: list[float]
    rest: dict[str, float]


class PartGradients:
    """The gradients of the parts, taken off the parameters one after the other, and put back as their sum."""

    def __init__(self, parameters: Sequence[nn.Parameter], gather: Gather | None = None) -> None:
        self._parameters, self._gather = parameters, gather
        self._parts: list[list[Tensor | None]] = []
        self._before: list[Tensor] = []

    def take(self) -> None:
        """Take the gradients off the parameters, as those of the next part."""
        self._parts.append([p.grad for p in self._parameters])
        for p in self._parameters:
            p.grad = None

    def put_sum(self) -> None:
        """Put the sum of all parts on the parameters."""
        for p, *grads in zip(self._parameters, *self._parts, strict=True):
            for grad in grads:
                if grad is not None:
                    p.grad = grad.clone() if p.grad is None else p.grad.add_(grad)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights before the optimizer's step."""
        self._before = [_weights(p, optimizer).clone() for p in self._parameters]

    @torch.no_grad()
    def end_step(self, optimizer: torch.optim.Optimizer, lr: float, clip: float) -> PartShares:
        """Return the shares after the step; `clip` is the factor of the gradient's clipping."""
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        count = len(self._parts)
        pairs = [(i, j) for i in range(count) for j in range(i + 1)]
        totals = torch.zeros(len(pairs) + count + 2, dtype=torch.float64)
        has_moments = True
        for p, before, *grads in zip(self._parameters, self._before, *self._parts, strict=True):
            parts = [_local(torch.zeros_like(p) if grad is None else grad) for grad in grads]
            dots = [_dot(parts[i], parts[j]) for i, j in pairs]
            state, group = optimizer.state.get(p, {}), groups[p]
            moment = state.get("exp_avg_sq")
            if moment is None or not moment.is_floating_point():
                has_moments, more = False, [0.0] * (count + 2)
            else:
                change = _local(_weights(p, optimizer)) - _local(before)
                corrected = _local(moment) / (1 - group["betas"][1] ** float(state["step"]))
                scaled = change * (-lr / (corrected.sqrt() + group["eps"]))
                decay = -lr * group["weight_decay"] * _dot(_local(before), change)
                more = [*(_dot(grad, scaled) for grad in parts), decay, _dot(change, change)]
            totals += torch.tensor([*dots, *more], dtype=torch.float64)
        if self._gather is not None:
            totals = torch.tensor(self._gather(totals.tolist()), dtype=torch.float64).sum(0)
        gram = torch.zeros(count, count, dtype=torch.float64)
        for (i, j), dot in zip(pairs, totals.tolist(), strict=False):
            gram[i, j] = gram[j, i] = dot
        *dots, decay, size = totals[len(pairs) :].tolist()
        if not has_moments or size == 0:
            return PartShares(gram.tolist(), [], {})
        shares = [dot / size for dot in dots]
        rest = {"clipping": (clip - 1) * sum(shares), "decay": decay / size}
        return PartShares(gram.tolist(), shares, {"momentum": 1 - sum(shares) - sum(rest.values()), **rest})


def _weights(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the weights that the optimizer changes: those of 16 bits have float32 ones beside them."""
    return optimizer.state.get(p, {}).get("master", p.detach())


def _local(x: Tensor) -> Tensor:
    """Return this rank's shard."""
    return x.to_local() if hasattr(x, "to_local") else x  # pyright: ignore[reportAttributeAccessIssue]


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
