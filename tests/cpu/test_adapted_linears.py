"""A linear layer with an adapter: PEFT's values and gradients, and one set of bits for learner and engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from practicum.cpu.adapted_linears import adapted_linear, is_plain_adapted
from tests.learning.reference import adapted


def layer_of(dtype: torch.dtype = torch.float64) -> Any:
    """A layer with an adapter that does something, and a bias."""
    model = adapted("llama", dtype, rank=3, alpha=5.0)
    layer: Any = model.get_submodule("model.layers.1.mlp.up_proj")
    generator = torch.Generator().manual_seed(0)
    layer.base_layer.bias = nn.Parameter(
        torch.randn(layer.base_layer.out_features, generator=generator, dtype=dtype), requires_grad=False
    )
    return layer


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(layer: Any, x: Tensor, forward: Any) -> tuple[Tensor, list[Tensor]]:
    """What a forward gives, and the gradients of the input and the adapter."""
    x = x.clone().requires_grad_()
    wrt = [x, *(p for p in layer.parameters() if p.requires_grad)]
    result = forward(x)
    return result, list(torch.autograd.grad((result * rows(*result.shape)).sum(), wrt))


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 5)])
def test_values_and_gradients_are_those_of_peft(shape: tuple[int, ...]):
    layer = layer_of()
    assert is_plain_adapted(layer)
    x = rows(*shape, layer.base_layer.in_features)
    mine, own = gradients(layer, x, layer)
    theirs, expected = gradients(layer, x, lambda x: type(layer).forward(layer, x))
    assert len(own) == 3
    assert type(mine.grad_fn).__name__ == "_AdaptedBackward"
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_bits_are_the_same_with_gradients_and_without():
    layer = layer_of(torch.float32)
    x = rows(8, layer.base_layer.in_features, dtype=torch.float32)
    with torch.no_grad():
        plain = layer(x)
        assert torch.equal(adapted_linear(x, layer), plain)
    assert torch.equal(layer(x), plain)


def test_under_autocast_the_layer_is_computed_by_peft():
    layer = layer_of(torch.float32)
    x = rows(4, layer.base_layer.in_features, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), type(layer).forward(layer, x))
        assert layer(x).dtype == torch.bfloat16
