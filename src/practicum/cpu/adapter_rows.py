"""A layer under several adapters: each row of a forward call is computed with its own adapter.

A linear layer multiplies all rows by its weight together, then adds to the rows of each adapter the product
of its two small matrices. What PEFT adapts in another way, such as experts, is computed adapter by adapter.
No row depends on the adapters of the others. For use without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from practicum.compat.peft import Factors, is_plain
from practicum.cpu.batch_invariance import ROWS, padded_rows


class RowPart(NamedTuple):
    """Rows of a forward call from `start` to before `stop`, and their adapter."""

    adapter: str
    start: int
    stop: int


class AdapterRows:
    """The adapters on one base, and which rows of the current forward call have which."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self.parts: Sequence[RowPart] = ()

    @contextmanager
    def use(self, parts: Sequence[RowPart]) -> Iterator[None]:
        """Context manager in which these rows use these adapters, and all others the base."""
        self.parts = parts
        try:
            yield
        finally:
            self.parts = ()


class RowsLayer(nn.Module):
    """A layer of the base, and PEFT's layers around it by adapter."""

    def __init__(self, base: nn.Module, adapted: Mapping[str, nn.Module], rows: AdapterRows) -> None:
        super().__init__()
        self.base_layer, self.adapted, self.rows = base, nn.ModuleDict(adapted), rows
        self.is_product = all(map(is_plain, adapted.values()))
        """True if all adapters here are products of two small matrices."""
        self._factors = {name: Factors.of(layer) for name, layer in adapted.items() if self.is_product}

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Rows lie along the last but one dimension."""
        if not self.is_product:
            return self._by_part(x, *more)
        result = self.base_layer(x)
        x_N, result_N = x.reshape(-1, x.shape[-1]), result.view(-1, result.shape[-1])
        for part in self.rows.parts:
            if part.adapter in self._factors:
                _add_product(result_N, x_N, part, self._factors[part.adapter])
        return result

    def _by_part(self, *inputs: Tensor) -> Tensor:
        """Compute each part by its own layer, of inputs that have a row for each row."""
        results, at, end = [], 0, inputs[0].shape[-2]
        for name, start, stop in (*self.rows.parts, RowPart("", end, end)):
            for adapter, first, last in (("", at, start), (name, start, stop)):
                if first < last:
                    layer = dict(self.adapted.items()).get(adapter, self.base_layer)
                    results.append(layer(*(x[..., first:last, :] for x in inputs)))
            at = stop
        return results[0] if len(results) == 1 else torch.cat(results, -2)


def _add_product(result_N: Tensor, x_N: Tensor, part: RowPart, factors: Factors) -> None:
    """Add an adapter's product to the rows of its part. A multiple of ROWS of them is taken, so that the bits
    do not depend on the batch: neighbours' rows, which are not copied, with a product of 0."""
    _, start, stop = part
    first, last = start // ROWS * ROWS, padded_rows(stop)
    rows_N = x_N[first:last]
    down, up, scaling = factors
    if x_N.dtype != down.dtype:
        inner_N = linear(rows_N.to(down.dtype), down)
        result_N[start:stop].add_(linear(inner_N, up)[start - first : stop - first].mul_(scaling))
        return
    inner_N = linear(rows_N, down).mul_(scaling)
    inner_N[: start - first] = 0.0
    inner_N[stop - first :] = 0.0
    result_N[first:last].addmm_(inner_N, up.t())
