"""Products by oneDNN: those of torch up to rounding, and the same bits however rows are put together."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear

from practicum.cpu.batch_invariance import ROWS, SIZES, pad_rows, padded_rows
from practicum.cpu.linears import (
    LEAST_NUMBERS,
    OneDnnLinear,
    PackedWeights,
    fuse_linears,
    is_product,
    product,
)

WIDE, NARROW = 384, 256


def layer(inputs: int = NARROW, outputs: int = WIDE, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(inputs, outputs, bias)
    fuse_linears(made)
    return made


def rows(count: int, width: int = NARROW) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("shape", [(5,), (1, 7), (2, 3, 4), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool):
    fused = layer(bias=bias)
    weights = [fused.weight] + ([fused.bias] if bias else [])
    x = torch.randn(*shape, NARROW, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert is_product(x, fused.weight)
    scale = torch.randn(*shape, WIDE, generator=torch.Generator().manual_seed(1))
    got, expected = fused(x), linear(x, fused.weight, fused.bias)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad((got * scale).sum(), [x, *weights]),
        torch.autograd.grad((expected * scale).sum(), [x, *weights]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(
    st.lists(st.integers(2, 90), min_size=1, max_size=4),
    st.sampled_from([(256, 256), (1024, 256), (256, 1024)]),
)
def test_a_row_has_the_same_bits_among_any_others(counts: list[int], shape: tuple[int, int]):
    weight, x = rows(shape[0], shape[1]), rows(sum(counts) + 1, shape[1])
    with torch.no_grad():
        whole, packed = product(x, weight), PackedWeights()
        for make in (False, True):
            parts = [packed.multiply(part, weight, None, make=make) for part in x[1:].split(counts)]
            assert torch.equal(torch.cat(parts), whole[1:])
        assert packed.nbytes == weight.nbytes
        other = rows(len(x), shape[0])
        added = packed.multiply(x, weight, None, make=False, then="add", other=other.clone())
        assert torch.equal(added, whole + other)
        multiplied = packed.multiply(x, weight, None, make=False, then="mul", other=other.clone())
        assert torch.equal(multiplied, whole * other)


def test_packed_copies_follow_their_weights():
    fused, x, packed = layer(), rows(8), PackedWeights()

    def check(make: bool = False) -> None:
        got = packed.multiply(x, fused.weight, fused.bias, make=make)
        assert torch.equal(got, fused(x))

    with torch.no_grad():
        check(make=True)
        fused.weight.mul_(2.0)
        check()
        check(make=True)
        fused.weight.data = fused.weight.data * 3.0
        check()
        check(make=True)
        fused.weight.data.add_(1.0)  # which torch does not count
        packed.forget([fused.weight])
        check()
    assert packed.nbytes == 0


def test_small_weights_and_other_number_types_are_multiplied_by_torch():
    small, double = layer(16, 8), layer().double()
    x = rows(4, 16)
    assert small.weight.numel() < LEAST_NUMBERS
    assert torch.equal(small(x), linear(x, small.weight, small.bias))
    assert torch.equal(double(rows(4).double()), linear(rows(4).double(), double.weight, double.bias))
    fused = layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(rows(4)).dtype == torch.bfloat16


def test_layers_can_be_copied_and_pickled():
    fused, x = layer(), rows(4)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(other) is OneDnnLinear
        assert torch.equal(other(x), fused(x))


def test_products_have_one_of_few_numbers_of_rows():
    most = 4096
    sizes = {count: len(pad_rows(torch.zeros(count, 1))) for count in range(1, most + 1)}
    assert all(count <= size <= padded_rows(count + count // SIZES) for count, size in sizes.items())
    doublings = (most // (SIZES * ROWS)).bit_length()
    assert len(set(sizes.values())) == SIZES * doublings
