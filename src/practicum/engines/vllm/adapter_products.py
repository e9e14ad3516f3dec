"""Products of several adapters in one pass on a CPU, in place of vLLM's own.

Those of vLLM 0.32 copy the matrices of a token's adapter for each token of a pass (gigabytes for a long one),
and give tokens without an adapter the product of the last one: their index -1 is taken as a place. Here each
run of tokens with one adapter is two products by its matrices, and others stay as they are. In processes of
vLLM only: importing this imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # pyright: ignore[reportMissingImports]


def repair_products() -> None:
    """Have this process compute adapters as this module does; to be called before a model is made."""
    PunicaWrapperCPU._shrink_prefill = _add_down
    PunicaWrapperCPU._expand_slice_prefill = _add_up


def _add_down(self: Any, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
    """Write x A into y, which holds zeros."""
    for place, start, stop in _runs(self):
        weight = w_t_all[place].squeeze(0).to(y.dtype)
        y[start:stop, : len(weight)] = linear(x[start:stop].to(y.dtype), weight) * scale


def _add_up(
    self: Any, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool
) -> None:
    """Add x B to the columns of y from `y_offset` on."""
    assert add_inputs, "a layer's own result is in y"
    for place, start, stop in _runs(self):
        added = linear(x[start:stop].to(y.dtype), w_t_all[place].squeeze(0).to(y.dtype))
        y[start:stop, y_offset : y_offset + y_slice_size] += added


def _runs(punica: Any) -> Iterator[tuple[int, int, int]]:
    """The place of an adapter, and the tokens from `start` to before `stop` that have it."""
    starts, lengths, places, *_ = punica.prefill_metadata
    for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
        if place >= 0:
            yield place, start, start + length
