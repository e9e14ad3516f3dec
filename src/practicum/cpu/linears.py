"""Products of linear layers on a CPU in float32 by oneDNN, which torch takes for other dtypes only.

oneDNN adds up each number of a result in the order of the inputs, however many rows there are (from 2 on) and
whatever is done to it next, and is faster than the library that torch would call. Learner and engines all
take this one, so that their numbers are the same bits. Small weights stay with torch's own: for them a call
of oneDNN costs more than it saves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from practicum.compat.torch import onednn_linear, onednn_pack, write_count
from practicum.cpu import switch
from practicum.cpu.row_parts import PartedEmbedding, RowParts, parts_of

for _name, _entries in {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}.items():
    # Both torch and oneDNN cache what they prepared for each number of rows, 1,024 entries by default.
    # oneDNN's cache is enough. They read this before their first product.
    os.environ.setdefault(_name, _entries)

LEAST_NUMBERS = 2**16
"""Minimum size (elements) of a weight for the oneDNN path."""
PACKED_FOR_ROWS = 256
"""Rows for which packed weights are laid out; others can be multiplied by them too."""


def is_product(x: Tensor, weight: Tensor) -> bool:
    """Return True if oneDNN multiplies these, whatever the number of rows."""
    return (
        switch.ENABLED
        and onednn_linear is not None
        and not torch.compiler.is_compiling()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.numel() >= LEAST_NUMBERS
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch's `linear`, by oneDNN where `is_product`."""
    parts = parts_of(x, weight)
    if parts is not None or (torch.is_grad_enabled() and is_product(x, weight)):
        return _Product.apply(x, weight, bias, parts)  # pyright: ignore[reportReturnType]
    return _times(x, weight, bias)


def _times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return (_multiply if is_product(x, weight) else linear)(x, weight, bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = onednn_linear(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")
    return rows.view(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: RowParts | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.parameters = parts, (weight, bias)
        return _times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_N, x_N, needed = (
            grads[0].reshape(-1, len(weight)),
            x.reshape(-1, x.shape[-1]),
            ctx.needs_input_grad,
        )
        grad_x = _times(grad_N, weight.t()).view(x.shape) if needed[0] else None
        if ctx.parts is None:
            grad_weight = _weight_gradient(grad_N, x_N) if needed[1] else None
            return grad_x, grad_weight, grad_N.sum(0) if needed[2] else None, None
        weight, bias = ctx.parameters
        ctx.parts.add(weight, lambda span, out: _weight_gradient(grad_N[span], x_N[span], out))
        if needed[2]:
            ctx.parts.add(bias, lambda span, out: torch.sum(grad_N[span], 0, out=out))
        return grad_x, None, None, None


def _weight_gradient(grad_N: Tensor, x_N: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum over rows of the outer products, by oneDNN, which takes half the time of torch's own. It
    may be written to `out`."""
    if not len(x_N) or grad_N.dtype != torch.float32 or grad_N.shape[1] * x_N.shape[1] < LEAST_NUMBERS:
        return torch.mm(grad_N.t(), x_N, out=out)
    if grad_N.shape[1] > x_N.shape[1]:  # oneDNN copies the first: the narrower one
        found = _multiply(x_N.t(), grad_N.t(), None).t()
    else:
        found = _multiply(grad_N.t(), x_N.t(), None)
    return found if out is None else out.copy_(found)


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def is_linear(module: nn.Module) -> bool:
    """Return True if a module is a matrix and nothing else."""
    return type(module) in (nn.Linear, OneDnnLinear)


def fuse_linears(model: nn.Module) -> None:
    """Have the model's linear layers multiply by `product`, and its embeddings keep parts apart."""
    kinds = {nn.Linear: OneDnnLinear, nn.Embedding: PartedEmbedding} if switch.ENABLED else {}
    for module in model.modules():
        module.__class__ = kinds.get(type(module), module.__class__)


class _Packed(NamedTuple):
    weight: Tensor
    place: int
    version: int
    copy: Tensor


class PackedWeights:
    """Copies of weights in the order in which oneDNN reads them, by which few rows are multiplied faster.

    A copy is made when a weight is first asked for with `make`, and anew when the weight has changed. Until
    then the weight itself is used. For use without gradients.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Packed] = {}

    @property
    def nbytes(self) -> int:
        return sum(packed.weight.nbytes for packed in self._copies.values())

    def forget(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop the copies of weights that may have changed in a way that torch does not see, or all."""
        for key in list(self._copies) if weights is None else map(id, weights):
            self._copies.pop(key, None)

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        make: bool,
        then: Literal["", "add", "mul"] = "",
        other: Tensor | None = None,
    ) -> Tensor:
        """Return the `product` of rows [N, K], added to `other` or multiplied by it (`other` may change)."""
        if not is_product(x, weight):
            rows = linear(x, weight, bias)
            return rows if other is None else combine(rows, then, other)
        used, packed = weight, self._copies.get(id(weight))
        if packed is not None and (packed.place, packed.version) == (weight.data_ptr(), write_count(weight)):
            used = packed.copy
        elif make:
            used = onednn_pack(weight.detach(), PACKED_FOR_ROWS)
            self._copies[id(weight)] = _Packed(weight, weight.data_ptr(), write_count(weight), used)
        if other is None:
            return onednn_linear(x, used, bias, "none", [], "")
        return onednn_linear.binary(x, other, used, bias, then)


def combine(rows: Tensor, then: Literal["", "add", "mul"], other: Tensor) -> Tensor:
    """Add rows to others, or multiply them, in place."""
    return other.add_(rows) if then == "add" else other.mul_(rows)
