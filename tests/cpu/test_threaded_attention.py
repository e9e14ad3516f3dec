"""Attention on two threads: torch's numbers, each product on one thread, and no trace of it afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from practicum.cpu.threaded_attention import scaled_dot_product_attention

_torch_attention = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def mkl_threads() -> int:
    count = getattr(ctypes.CDLL(torch._C.__file__), "MKL_Get_Max_Threads", None)
    if count is None:
        pytest.skip("torch without MKL")
    return count()


def computed(attend: Callable[..., Tensor], seen: list[int] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, 2, n, 64, generator=generator).requires_grad_() for n in (4, 48, 48)]
    out = attend(*inputs, torch.zeros(64, 1, 1, 48), scale=0.1)
    if seen is not None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda _: seen.append(mkl_threads()))
    out.square().sum().backward()
    return [out, *(x.grad for x in inputs if x.grad is not None)]


def test_outputs_and_gradients_are_torchs_own():
    mine, theirs = computed(scaled_dot_product_attention), computed(_torch_attention)
    assert len(mine) == 4
    assert all(map(torch.equal, mine, theirs))


def test_products_have_one_thread_in_attention_and_all_of_them_afterwards(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def attend(*inputs: Any, **options: Any) -> Tensor:
        seen.append(mkl_threads())
        return _torch_attention(*inputs, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    assert mkl_threads() == 2
    computed(scaled_dot_product_attention, seen)
    assert seen == [1, 1]
    assert mkl_threads() == 2
