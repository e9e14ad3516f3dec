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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from practicum.cpu.row_parts import PartGrads

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
        self._apart = PartGrads(0)
        self._taken: list[dict[Tensor, Tensor]] = []
        self._before: dict[nn.Parameter, Tensor] = {}

    def begin(self, count: int = 0) -> PartGrads:
        """Forget all gradients. Return where those of this many parts go; others are taken."""
        self._taken, self._apart = [], PartGrads(count)
        return self._apart

    def take(self) -> None:
        """Take the gradients off the parameters, as those of the next part."""
        self._taken.append({p: p.grad for p in self._parameters if p.grad is not None})
        for p in self._parameters:
            p.grad = None

    def _grads(self, p: nn.Parameter) -> Sequence[Tensor]:
        """Return the gradients of all parts, stacked if they were kept apart. None have one: []."""
        if p in self._apart.stacks or not any(p in grads for grads in self._taken):
            return self._apart.stacks.get(p, [])  # pyright: ignore[reportReturnType]
        return [grads[p] if p in grads else torch.zeros_like(p) for grads in self._taken]

    @torch.no_grad()
    def put_sum(self) -> None:
        """Put the sum of all parts on the parameters."""
        for p in self._parameters:
            grads = [*self._grads(p)]
            if grads:
                p.grad = grads[0] + grads[1] if len(grads) > 1 else grads[0].clone()
                for grad in grads[2:]:
                    p.grad += grad

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights before the optimizer's step."""
        self._before = {p: _weights(p, optimizer).clone() for p in self._parameters}

    @torch.no_grad()
    def end_step(self, optimizer: torch.optim.Optimizer, lr: float, clip: float) -> PartShares:
        """Return the shares after the step. `clip` is the factor of the gradient's clipping. With `project`
        the step is first changed so that no part gets worse by it."""
        removed = self._project(optimizer) if self._project_step else []
        found = self._products(optimizer)
        if not found.scaled or found.size == 0:
            return PartShares(found.gram, [], {})
        shares = [-lr * x / found.size for x in found.scaled]
        rest = {"clipping": (clip - 1) * sum(shares), "decay": -lr * found.decay / found.size}
        if self._project_step:
            along = sum(x * rise for x, rise in zip(removed, found.rises, strict=True))
            rest["projection"] = -along / found.size
        return PartShares(found.gram, shares, {"momentum": 1 - sum(shares) - sum(rest.values()), **rest})

    def _project(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """Move the weights to the nearest step that makes no part worse, to first order.

        With d AdamW's step and G the parts' gradients: min |x - d|^2 with G^T x <= 0 is x = d - G m, where m
        solves the small dual problem. Return m. Weights are rounded, so the constraint is looked at again.
        """
        removed = [0.0] * (self._apart.count or len(self._taken))
        for _ in range(ROUNDS):
            gram, size, rises, *_ = self._products(optimizer, moments=False)
            norms = [(gram[i][i] * size) ** 0.5 for i in range(len(gram))]
            if all(rise <= TOLERANCE * norm for rise, norm in zip(rises, norms, strict=True)):
                break
            # A little beyond the constraint, so that rounding does not lead back over it.
            beyond = [rise + TOLERANCE / 2 * norm for rise, norm in zip(rises, norms, strict=True)]
            multipliers = nonnegative_solution(gram, beyond)
            for p in self._parameters:
                weights = _weights(p, optimizer)
                for x, grad in zip(multipliers, self._grads(p), strict=False):
                    if x:
                        weights.sub_(grad.to(weights.dtype), alpha=x)
                if weights is not p:
                    p.detach().copy_(weights)
            removed = [a + b for a, b in zip(removed, multipliers, strict=True)]
        return removed

    def _products(self, optimizer: torch.optim.Optimizer, *, moments: bool = True) -> _Products:
        """Return dot products over all parameters and ranks: all with `moments`, if the optimizer has them,
        or those of gradients and change, in float64."""
        moments = moments and all(_has_moment(optimizer, p) for p in self._parameters)
        count, projects = self._apart.count or len(self._taken), self._project_step
        sizes = [count * count, 1, *[count] * projects, *[count, 1] * moments]
        total = torch.zeros(sum(sizes), dtype=torch.float64)
        for group in optimizer.param_groups:
            parameters, root, decay = group["params"], 1.0, group["weight_decay"]
            if moments:  # all take every step
                root = (1 - group["betas"][1] ** float(optimizer.state[parameters[0]]["step"])) ** 0.5
            eps = root * group["eps"] if moments else None
            pieces = (piece for p in parameters for piece in self._pieces(p, optimizer, eps))
            factors = [1.0, 1.0, *[1.0] * projects, *[root, decay] * moments]
            kinds = zip(factors, zip(*pieces, strict=True), strict=True)
            sums = [factor * torch.stack(x).double().sum(0).flatten() for factor, x in kinds]
            total += torch.cat(sums).cpu()
        if self._gather is not None:
            total = torch.tensor(self._gather(total.tolist()), dtype=torch.float64).sum(0)
        gram, size, *more = total.split(sizes)
        rises = more.pop(0).tolist() if projects else []
        scaled, decayed = (more[0].tolist(), float(more[1])) if moments else ([], 0.0)
        return _Products(gram.view(count, count).tolist(), float(size), rises, scaled, decayed)

    def _pieces(
        self, p: nn.Parameter, optimizer: torch.optim.Optimizer, eps: float | None
    ) -> Iterator[list[Tensor]]:
        """Yield dot products of some numbers of a parameter, in the order of `_Products`. With `eps`, those
        of moments too."""
        before, grads = _flat(self._before[p]), self._grads(p)
        parts = [grads.flatten(1)] if isinstance(grads, Tensor) else [*map(_flat, grads)]
        if not parts:
            parts = [torch.zeros_like(before)] * (self._apart.count or len(self._taken))
        columns = [*parts, before, _flat(_weights(p, optimizer))]
        columns += [] if eps is None else [_flat(optimizer.state[p]["exp_avg_sq"])]
        dtype = torch.float64 if eps is None else torch.promote_types(before.dtype, torch.float32)
        fits = len(before) <= self._piece
        for rows in [columns] if fits else zip(*(x.split(self._piece, -1) for x in columns), strict=True):
            same = [x if x.dtype == dtype else x.to(dtype) for x in rows]
            grads_TN = same[0] if same[0].dim() > 1 else torch.stack(same[: len(parts)])
            before_N, after_N, *moment = same[len(parts) :]
            change_N = after_N - before_N
            found = [grads_TN @ grads_TN.T, torch.dot(change_N, change_N)]
            if self._project_step:
                found.append(grads_TN @ change_N)
            if eps is not None:
                root_N = moment[0].sqrt().add_(eps)
                scaled_N = torch.div(change_N, root_N, out=root_N)
                found += [grads_TN @ scaled_N, torch.dot(before_N, change_N)]
            yield found


class _Products(NamedTuple):
    """Dot products of the parts' gradients g_i, the weights' change d, and the weights w before it."""

    gram: list[list[float]]
    size: float
    """<d, d>"""
    rises: list[float]
    """<g_i, d>, if the step is projected."""
    scaled: list[float]
    """<g_i, d / (sqrt(v) + eps)>, if the optimizer has second moments."""
    decay: float
    """<weight_decay w, d>"""


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
