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
PIECE = 1 << 15
"""Numbers of a parameter that are looked at together on a CPU."""
Gather = Callable[[list[float]], list[list[float]]]
"""Returns these numbers of all ranks."""


@dataclass(frozen=True, slots=True)
class PartShares:
    """Dot products of the parts' gradients in an optimizer step, and each part's share of the update.

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

    @torch.no_grad()
    def put_sum(self) -> None:
        """Put the sum of all parts on the parameters."""
        for p, *grads in zip(self._parameters, *self._parts, strict=True):
            present = [grad for grad in grads if grad is not None]
            if present:
                p.grad = present[0] + present[1] if len(present) > 1 else present[0].clone()
                for grad in present[2:]:
                    p.grad += grad

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights before the optimizer's step."""
        self._before = [_weights(p, optimizer).clone() for p in self._parameters]

    @torch.no_grad()
    def end_step(self, optimizer: torch.optim.Optimizer, lr: float, clip: float) -> PartShares:
        """Return the shares after the step. `clip` is the factor of the gradient's clipping. With `project`
        the step is first changed so that no part gets worse by it."""
        count = len(self._parts)
        removed = self._project(optimizer) if self._project_step else [0.0] * count
        products = self._products(optimizer)
        gram, change = [row[:count] for row in products[:count]], count
        size = products[change][change]
        if len(products) == count + 1 or size == 0:
            return PartShares(gram, [], {})
        decay, scaled = change + 1, change + 2
        shares = [-lr * products[i][scaled] / size for i in range(count)]
        rest = {"clipping": (clip - 1) * sum(shares), "decay": -lr * products[decay][change] / size}
        if self._project_step:
            rest["projection"] = -sum(x * products[i][change] for i, x in enumerate(removed)) / size
        return PartShares(gram, shares, {"momentum": 1 - sum(shares) - sum(rest.values()), **rest})

    def _project(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """Move the weights to the nearest step that makes no part worse, to first order.

        With d AdamW's step and G the parts' gradients: min |x - d|^2 with G^T x <= 0 is x = d - G m, where m
        solves the small dual problem. Return m. Weights are rounded, so the constraint is looked at again.
        """
        removed = [0.0] * len(self._parts)
        for _ in range(ROUNDS):
            *rows, (*rises, size) = self._products(optimizer, moments=False)
            gram = [row[:-1] for row in rows]
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

    def _products(self, optimizer: torch.optim.Optimizer, *, moments: bool = True) -> list[list[float]]:
        """Return the dot products of all pairs of these, over all parameters and ranks.

        The parts' gradients and the weights' change d; with `moments`, if the optimizer has them, also the
        decayed weights and d / (sqrt(v) + eps). Without, products are in float64.

        Everything is read once, in pieces that stay in the processor's cache.
        """
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        moments = moments and all(_has_moment(optimizer, p) for p in self._parameters)
        count = len(self._parts)
        size = count + 3 if moments else count + 1
        total, buffer = torch.zeros(size, size, dtype=torch.float64), torch.empty(0)
        for p, before, *grads in zip(self._parameters, self._before, *self._parts, strict=True):
            state, group = optimizer.state.get(p, {}), groups[p]
            old, new = _flat(before), _flat(_weights(p, optimizer))
            parts = [None if grad is None else _flat(grad) for grad in grads]
            dtype = torch.promote_types(old.dtype, torch.float32) if moments else torch.float64
            piece = PIECE if old.device.type == "cpu" else max(1, len(old))
            if buffer.dtype != dtype or buffer.shape[-1] < min(piece, len(old)):
                buffer = torch.empty(size, min(piece, len(old)), dtype=dtype, device=old.device)
            for start in range(0, len(old), piece):
                here = slice(start, min(start + piece, len(old)))
                rows = buffer[:, : here.stop - start]
                for row, x in zip(rows, parts, strict=False):
                    row.zero_() if x is None else row.copy_(x[here])
                change = torch.sub(rows[count].copy_(new[here]), old[here].to(dtype), out=rows[count])
                if moments:
                    corrected = 1 - group["betas"][1] ** float(state["step"])
                    scaled = torch.sqrt(_flat(state["exp_avg_sq"])[here].to(dtype), out=rows[count + 2])
                    scaled.mul_(corrected**-0.5).add_(group["eps"])
                    torch.div(change, scaled, out=scaled)
                    torch.mul(old[here].to(dtype), group["weight_decay"], out=rows[count + 1])
                total = total.to(rows.device) + (rows @ rows.T).double()
        if self._gather is not None:
            gathered = torch.tensor(self._gather(total.flatten().tolist()), dtype=torch.float64).sum(0)
            total = gathered.reshape(total.shape)
        return total.tolist()


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


def _flat(x: Tensor) -> Tensor:
    """Return this rank's shard, flat."""
    return (x.to_local() if hasattr(x, "to_local") else x).flatten()  # pyright: ignore[reportAttributeAccessIssue]
