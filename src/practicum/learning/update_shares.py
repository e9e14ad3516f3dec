"""Shares of an optimizer step: the gradients of parts of a mini-batch, and their shares of the weight change.

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

ROUNDS = 5
"""How often a projected step is corrected for the rounding of the weights."""
TOLERANCE = 1e-6
"""Largest cosine of a part's gradient and a projected step."""
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

    def __init__(
        self, parameters: Sequence[nn.Parameter], gather: Gather | None = None, *, project: bool = False
    ) -> None:
        self._parameters, self._gather, self._project_step = parameters, gather, project
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
        """Return the shares after the step; `clip` is the factor of the gradient's clipping.

        With `project` the step is first changed so that no part gets worse by it.
        """
        gram, project = self._gram(), self._project_step
        removed = self._project(optimizer, gram) if project else [0.0] * len(gram)
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        if any(not _has_moment(optimizer, p) for p in self._parameters):
            return PartShares(gram, [], {})

        def dots(p: nn.Parameter, before: Tensor, parts: list[Tensor]) -> list[float]:
            state, group = optimizer.state[p], groups[p]
            change = _local(_weights(p, optimizer)) - before
            corrected = _local(state["exp_avg_sq"]) / (1 - group["betas"][1] ** float(state["step"]))
            scaled = change * (-lr / (corrected.sqrt() + group["eps"]))
            decay = -lr * group["weight_decay"] * _dot(before, change)
            projected = -sum(x * _dot(grad, change) for x, grad in zip(removed, parts, strict=True))
            return [*(_dot(grad, scaled) for grad in parts), decay, projected, _dot(change, change)]

        *parts, decay, projected, size = self._added(dots)
        if size == 0:
            return PartShares(gram, [], {})
        shares = [dot / size for dot in parts]
        rest = {"clipping": (clip - 1) * sum(shares), "decay": decay / size}
        if project:
            rest["projection"] = projected / size
        return PartShares(gram, shares, {"momentum": 1 - sum(shares) - sum(rest.values()), **rest})

    def _project(self, optimizer: torch.optim.Optimizer, gram: list[list[float]]) -> list[float]:
        """Move the weights to the nearest step that makes no part worse, to first order.

        With d AdamW's step and G the parts' gradients: min |x - d|^2 with G^T x <= 0 is x = d - G m, where m
        solves the small dual problem. Return m. Weights are rounded, so the constraint is looked at again.
        """

        def against(p: nn.Parameter, before: Tensor, parts: list[Tensor]) -> list[float]:
            change = _local(_weights(p, optimizer)) - before
            return [*(_dot(grad, change) for grad in parts), _dot(change, change)]

        removed = [0.0] * len(gram)
        for _ in range(ROUNDS):
            *rises, size = self._added(against)
            norms = [(gram[i][i] * size) ** 0.5 for i in range(len(gram))]
            if all(rise <= TOLERANCE * norm for rise, norm in zip(rises, norms, strict=True)):
                break
            # A little beyond the constraint, so that rounding does not lead back over it.
            beyond = [rise + TOLERANCE / 2 * norm for rise, norm in zip(rises, norms, strict=True)]
            multipliers = nonnegative_solution(gram, beyond)
            for p, *grads in zip(self._parameters, *self._parts, strict=True):
                weights = _weights(p, optimizer)
                for x, grad in zip(multipliers, grads, strict=True):
                    if x and grad is not None:
                        weights.sub_(grad.to(weights.dtype), alpha=x)
                if weights is not p:
                    p.detach().copy_(weights)
            removed = [a + b for a, b in zip(removed, multipliers, strict=True)]
        return removed

    def _gram(self) -> list[list[float]]:
        count = len(self._parts)
        pairs = [(i, j) for i in range(count) for j in range(i + 1)]
        found = self._added(lambda p, before, parts: [_dot(parts[i], parts[j]) for i, j in pairs])
        at = dict(zip(pairs, found, strict=True))
        return [[at[max(i, j), min(i, j)] for j in range(count)] for i in range(count)]

    def _added(self, dots: Callable[[nn.Parameter, Tensor, list[Tensor]], list[float]]) -> list[float]:
        """Return the sums of these dot products over all parameters and ranks.

        `dots` gets a parameter, its weights before the step and the parts' gradients: this rank's shards.
        """
        rows = []
        for p, before, *grads in zip(self._parameters, self._before, *self._parts, strict=True):
            parts = [_local(torch.zeros_like(p) if grad is None else grad) for grad in grads]
            rows.append(dots(p, _local(before), parts))
        totals = torch.tensor(rows, dtype=torch.float64).sum(0)
        if self._gather is not None:
            totals = torch.tensor(self._gather(totals.tolist()), dtype=torch.float64).sum(0)
        return totals.tolist()


def nonnegative_solution(gram: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Return the x >= 0 with the least x^T gram x / 2 - x^T right, by descent along each axis in turn."""
    found = [0.0] * len(right)
    for _ in range(10_000):
        largest = 0.0
        for i, row in enumerate(gram):
            if row[i] > 0:
                slope = right[i] - sum(a * x for a, x in zip(row, found, strict=True))
                new = max(0.0, found[i] + slope / row[i])
                largest = max(largest, abs(new - found[i]) * row[i] ** 0.5)
                found[i] = new
        if largest <= 1e-12 * max(map(abs, right), default=0.0):
            break
    return found


def _has_moment(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    moment = optimizer.state.get(p, {}).get("exp_avg_sq")
    return moment is not None and moment.is_floating_point()


def _weights(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the weights that the optimizer changes: those of 16 bits have float32 ones beside them."""
    return optimizer.state.get(p, {}).get("master", p.detach())


def _local(x: Tensor) -> Tensor:
    """Return this rank's shard."""
    return x.to_local() if hasattr(x, "to_local") else x  # pyright: ignore[reportAttributeAccessIssue]


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
