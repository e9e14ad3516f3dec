"""Linear layers with LoRA adapters, W x + s · B A x, in fewer passes than PEFT's own forward takes.

The second product is added into the first one, and the backward pass makes no tensor of the layer's width but
its gradient. Learner and engines all take this, so that their numbers are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from practicum.compat.peft import Factors, is_off, is_plain
from practicum.cpu import switch
from practicum.cpu.linears import is_linear, product


def is_plain_adapted(module: nn.Module) -> bool:
    """Return True for a linear layer to which PEFT adds one product, all in one dtype."""
    layer: Any = module
    return (
        is_plain(module)
        and is_linear(layer.base_layer)
        and Factors.of(layer).down.dtype == layer.base_layer.weight.dtype
    )


def fuse_adapter(model: nn.Module) -> None:
    """Replace PEFT's forward in the adapted linear layers of a model. Values change by rounding only."""
    for module in model.modules():
        if switch.ENABLED and is_plain_adapted(module):
            module.forward = MethodType(_forward, module)


def adapted_linear(x: Tensor, layer: Any, multiply: Callable[..., Tensor] = product) -> Tensor:
    """Compute an adapted layer without gradients. `multiply` is `product`, maybe with packed weights."""
    base = layer.base_layer
    result = multiply(x, base.weight, base.bias)
    if is_off(layer):
        return result
    factors = Factors.of(layer)
    return _add(result, linear(x, factors.down), factors)


def _add(result: Tensor, inner: Tensor, factors: Factors) -> Tensor:
    """Add s · B (A x) in place to the result of the layer without its adapter. `inner` is A x."""
    rows = result.view(-1, result.shape[-1])
    # Scaled before: where the product is scaled, algebra libraries choose by its shape what they scale.
    rows.addmm_(inner.reshape(len(rows), -1) * factors.scaling, factors.up.t())
    return result


def _forward(self: Any, x: Tensor, *more: Any, **options: Any) -> Tensor:
    """Replace the module's own forward. It can be pickled by its name."""
    base = self.base_layer
    if is_off(self):
        return base(x)
    if more or options or x.dtype != base.weight.dtype or torch.is_autocast_enabled(x.device.type):
        return type(self).forward(self, x, *more, **options)
    if not torch.is_grad_enabled():
        return adapted_linear(x, self)
    return _Adapted.apply(x, base.weight, base.bias, *Factors.of(self))  # pyright: ignore[reportReturnType]


class _Adapted(torch.autograd.Function):
    """The layer with gradients of its input and of the adapter. The base's weight and bias get none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        inner = linear(x, down)
        ctx.save_for_backward(x, inner, weight, down, up)
        ctx.scaling = scaling
        return _add(product(x, weight, bias), inner, Factors(down, up, scaling))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, down, up = ctx.saved_tensors
        grad_N = grads[0].reshape(-1, weight.shape[0])
        x_N, inner_N = x.reshape(len(grad_N), -1), inner.reshape(len(grad_N), -1)
        # The small side comes first: the other way round, such products take up to ten times as long here.
        scaled = (up.t() @ grad_N.t()).mul_(ctx.scaling)
        grad_up = (inner_N.t() @ grad_N).mul_(ctx.scaling).t()
        grad_down = scaled @ x_N
        if not ctx.needs_input_grad[0]:
            return None, None, None, grad_down, grad_up, None
        grad_x = product(grad_N, weight.t()).addmm_(scaled.t(), down).view(x.shape)
        return grad_x, None, None, grad_down, grad_up, None
