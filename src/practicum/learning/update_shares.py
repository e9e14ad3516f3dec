"""Shares of an optimizer step: the gradients of parts of a mini-batch, and their shares of the weight change.

Parts are the rows of a teacher in a domain. Layers keep the gradients g_i of parts apart in the update's one
backward pass (`cpu/row_parts.py`), or parts are back-propagated one after the other. With d the change of the
weights in AdamW's step, and v its second moment after it:

    u_i = -lr g_i / (sqrt(v) + eps)            share_i = <u_i, d> / <d, d>
    clipping = (c - 1) sum_i share_i           c: the factor by which the global norm was clipped
    decay = <-lr weight_decay w, d> / <d, d>   w: the weights before the step
    momentum = 1 - all of these                what earlier steps' gradients add, and rounding

A share below 0 is of a part that works against the step. Under Adam a share of the gradient says little: its
coordinates are divided by sqrt(v), and a part may have most of the norm in coordinates that hardly move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from practicum.cpu.row_parts import Grads

ROUNDS = 5
"""How often a projected step is corrected for the rounding of the weights."""
TOLERANCE = 1e-6
"""Largest cosine of a part's gradient and a projected step."""
PIECE, GPU_PIECE = 1 << 16, 1 << 24
"""Numbers of parameters that are looked at together, in a processor's cache or on a GPU."""
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
    """The gradients of the parts. They are put on the parameters as their sum."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], gather: Gather | None = None, *, project: bool = False
    ) -> None:
        self._parameters, self._gather, self._project_step = parameters, gather, project
        self._piece = PIECE if all(p.device.type == "cpu" for p in parameters) else GPU_PIECE
        self._parts: list[Grads] = []
        self._before: dict[nn.Parameter, Tensor] = {}

    def begin(self, count: int = 0) -> list[Grads]:
        """Forget all gradients. Return where those of this many parts go; others are taken."""
        self._parts = [{} for _ in range(count)]
        return self._parts

    def take(self) -> None:
        """Take the gradients off the parameters, as those of the next part."""
        self._parts.append({p: p.grad for p in self._parameters if p.grad is not None})
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def put_sum(self) -> None:
        """Put the sum of all parts on the parameters."""
        for p in self._parameters:
            present = [grads[p] for grads in self._parts if p in grads]
            if present:
                p.grad = present[0] + present[1] if len(present) > 1 else present[0].clone()
                for grad in present[2:]:
                    p.grad += grad

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights before the optimizer's step."""
        self._before = {p: _weights(p, optimizer).clone() for p in self._parameters}

    @torch.no_grad()
    def end_step(self, optimizer: torch.optim.Optimizer, lr: float, clip: float) -> PartShares:
        """Return the shares after the step. `clip` is the factor of the gradient's clipping. With `project`
        the step is first changed so that no part gets worse by it."""
        count = change = len(self._parts)
        removed = self._project(optimizer) if self._project_step else [0.0] * count
        products = self._products(optimizer)
        gram, size = [row[:count] for row in products[:count]], products[change][change]
        if len(products[change]) == count + 1 or size == 0:
            return PartShares(gram, [], {})
        scaled, decay = change + 1, change + 2
        shares = [-lr * products[i][scaled] / size for i in range(count)]
        rest = {"clipping": (clip - 1) * sum(shares), "decay": -lr * products[change][decay] / size}
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
            for p in self._parameters:
                weights = _weights(p, optimizer)
                for x, grads in zip(multipliers, self._parts, strict=True):
                    if x and p in grads:
                        weights.sub_(grads[p].to(weights.dtype), alpha=x)
                if weights is not p:
                    p.detach().copy_(weights)
            removed = [a + b for a, b in zip(removed, multipliers, strict=True)]
        return removed

    def _products(self, optimizer: torch.optim.Optimizer, *, moments: bool = True) -> list[list[float]]:
        """Return dot products over all parameters and ranks, of the parts' gradients and the weights' change.

        With each other, and with `moments`, if the optimizer has them, also with d / (sqrt(v) + eps) and the
        decayed weights. Without, products are in float64.
        """
        moments = moments and all(_has_moment(optimizer, p) for p in self._parameters)
        count = len(self._parts)
        size = count + 3 if moments else count + 1
        total = torch.zeros(count + 1, size, dtype=torch.float64)
        for group, parameters in self._runs(optimizer):
            for rows in self._rows(group, parameters, optimizer, moments):
                total = total.to(rows.device) + (rows[: count + 1] @ rows[:size].T).double()
        if self._gather is not None:
            ranks = self._gather(total.flatten().tolist())
            total = torch.tensor(ranks, dtype=torch.float64).sum(0).view_as(total)
        return total.tolist()

    def _runs(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
        """Yield the parameters of each group, a few small ones together, and the group's settings."""
        for group in optimizer.param_groups:
            run: list[nn.Parameter] = []
            for p in group["params"]:
                if run and sum(q.numel() for q in run) + p.numel() > self._piece:
                    yield group, run
                    run = []
                run.append(p)
            yield group, run

    def _rows(
        self, group: dict[str, Any], run: list[nn.Parameter], optimizer: torch.optim.Optimizer, moments: bool
    ) -> Iterator[Tensor]:
        """Yield rows of some numbers of these parameters: the parts' gradients, the weights' change d, and
        with `moments` d / (sqrt(v) + eps) and the decayed weights."""
        states, old = [optimizer.state.get(p, {}) for p in run], [self._before[p] for p in run]
        found = [[part[p] if p in part else torch.zeros_like(p) for p in run] for part in self._parts]
        found.append([_weights(p, optimizer) for p in run])
        found.append([state["exp_avg_sq"] for state in states] if moments else old)
        columns = [[_flat(x) for x in column] for column in (*found, old)]
        dtype = torch.promote_types(old[0].dtype, torch.float32) if moments else torch.float64
        for start in range(0, length := sum(x.numel() for x in columns[-1]), self._piece):
            end = min(start + self._piece, length)
            rows = columns[-1][0].new_empty(len(columns), end - start, dtype=dtype)
            for row, column in zip(rows, columns, strict=True):
                torch.cat([x[start:end] for x in column], out=row)
            change, scaled, before = rows[-3:]
            change -= before
            if moments:
                corrected = 1 - group["betas"][1] ** float(states[0]["step"])  # all take every step
                scaled.sqrt_().mul_(corrected**-0.5).add_(group["eps"])
                torch.div(change, scaled, out=scaled)
                before *= group["weight_decay"]
            yield rows


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
