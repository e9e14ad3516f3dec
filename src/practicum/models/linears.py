"""Products of linear layers on a CPU in float32 by oneDNN, which torch takes for other number types only.

oneDNN adds up each number of a result in the order of the inputs, however many rows there are (from 2 on) and
whatever is done to it next, and is faster than the library that torch would call. Learner and engines all
take this one, so that their numbers are the same bits. Small weights stay with torch's own: for them a call
of oneDNN costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LEAST_NUMBERS = 2**16
"""Of a weight that is multiplied by oneDNN."""
PACKED_FOR_ROWS = 256
"""Rows for which packed weights are laid out; others can be multiplied by them too."""
_HAS_KERNELS = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in (
    "AVX2",
    "AVX512",
)


def is_product(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these: what is not asked is how many rows there are."""
    return (
        _HAS_KERNELS
        and not torch.compiler.is_compiling()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.numel() >= LEAST_NUMBERS
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch's `linear`, which it is for other number types, devices, processors and small weights."""
    if not is_product(x, weight):
        return linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return _multiply(x, weight, bias)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), weight, bias, "none", [], "")
    return rows.view(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needed = grads[0].reshape(-1, len(weight)), ctx.needs_input_grad
        grad_x = _multiply(grad, weight.t(), None).view(x.shape) if needed[0] else None
        grad_weight = grad.t() @ x.reshape(-1, x.shape[-1]) if needed[1] else None
        return grad_x, grad_weight, grad.sum(0) if needed[2] else None


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear's."""
        return product(input, self.weight, self.bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix and nothing else."""
    return type(module) in (nn.Linear, OneDnnLinear)


def fuse_linears(model: nn.Module) -> None:
    """Have the model's linear layers multiply by `product`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


@dataclass(frozen=True, slots=True)
class _Packed:
    weight: Tensor
    place: int
    version: int
    copy: Tensor


class PackedWeights:
    """Copies of weights in the order in which oneDNN reads them, by which few rows are multiplied faster.

    A copy is made when a weight is first asked for with `make`, and anew when the weight has changed; until
    then the weight itself is given. For use without gradients.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Packed] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(packed.weight.nbytes for packed in self._copies.values())

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Give up the copies of these weights, which may have changed in a way that torch does not see."""
        for weight in weights:
            self._copies.pop(id(weight), None)

    def clear(self) -> None:
        """Give up all copies."""
        self._copies.clear()

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
        """The `product` of rows [N, K]; then added to `other` or multiplied by it (`other` may change)."""
        if not is_product(x, weight):
            rows = linear(x, weight, bias)
        elif other is None:
            copy = self._get(weight, make)
            return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
        else:
            copy = self._get(weight, make)
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, copy, bias, then)
        return rows if other is None else combine(rows, then, other)

    def _get(self, weight: Tensor, make: bool) -> Tensor:
        found = self._copies.get(id(weight))
        if found is not None and (found.place, found.version) == (weight.data_ptr(), weight._version):
            return found.copy
        if not make:
            return weight
        copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)
        self._copies[id(weight)] = _Packed(weight, weight.data_ptr(), weight._version, copy)
        return copy


def combine(rows: Tensor, then: Literal["", "add", "mul"], other: Tensor) -> Tensor:
    """Rows added to others, or multiplied by them; the others are overwritten."""
    return other.add_(rows) if then == "add" else other.mul_(rows)
