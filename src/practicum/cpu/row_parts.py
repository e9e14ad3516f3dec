"""Gradients of parts of a micro-batch by one backward pass, on a CPU.

Tokens of a part lie beside each other and share nothing with those of others. In a layer that works on each
token by itself, a part's gradient is that of its tokens. Such layers ask `parts_of` in the forward pass, and
add the gradients in the backward pass. Others leave that of all parts on their parameters for the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


@dataclass(frozen=True, slots=True)
class PartGrads:
    """The gradients of `count` parts, by parameter: those of all parts one after the other [count, ...]."""

    count: int
    stacks: dict[Tensor, Tensor] = field(default_factory=dict)


class RowParts:
    """The parts of tokens, in order, and the gradients of each part so far. `rows` are those of a layer's
    input, in which padding may follow the tokens."""

    def __init__(self, part_N: Tensor, grads: PartGrads, rows: int = 0) -> None:
        self.part_N, self.grads, self.rows = part_N, grads, rows
        ends = torch.searchsorted(part_N, torch.arange(grads.count), right=True).tolist()
        self.spans = [slice(start, end) for start, end in pairwise([0, *ends])]

    def take(self, index: Tensor | slice, rows: int = 0) -> RowParts:
        return RowParts(self.part_N[index], self.grads, rows)

    def add(self, parameter: Tensor, write: Callable[[slice, Tensor], object]) -> None:
        """Add the gradient of each part's rows, which `write` writes. Padding has none."""
        if (stack := self.grads.stacks.get(parameter)) is not None:
            spare = torch.empty_like(stack[0])
            for grad, span in zip(stack, self.spans, strict=True):
                if span.start < span.stop:
                    write(span, spare)
                    grad += spare
            return
        shape = self.grads.count, *parameter.shape
        self.grads.stacks[parameter] = stack = torch.empty(shape, dtype=parameter.dtype)
        for grad, span in zip(stack, self.spans, strict=True):
            if span.start < span.stop:
                write(span, grad)
            else:
                grad.zero_()


_inputs: ContextVar[Mapping[Tensor | None, RowParts]] = ContextVar("inputs", default={})  # noqa: B039


@contextmanager
def parted(tokens: RowParts, inputs: Mapping[Tensor, RowParts]) -> Iterator[None]:
    """Context manager in which layers keep parts apart, of all tokens or of a parameter's `inputs`."""
    token = _inputs.set({None: tokens, **inputs})
    try:
        yield
    finally:
        _inputs.reset(token)


def parts_of(x: Tensor, weight: Tensor) -> RowParts | None:
    """Return the parts of the rows of an input, or None if its layer leaves gradients to autograd."""
    inputs = {} if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _inputs.get()
    # Ids are inputs of the embedding, whose weights may be the head's too.
    parts = inputs.get(weight if x.is_floating_point() else None, inputs.get(None))
    axis = int(x.dim() > 1 and x.shape[0] == 1)
    fits = (
        parts is not None
        and weight.requires_grad
        and type(weight) is nn.Parameter
        and (x.dtype == weight.dtype or not x.is_floating_point())
        and x.shape[axis] == parts.rows
        and parts.rows not in x.shape[axis + 1 : -1]  # else the tokens' axis is not known
        and not torch.is_autocast_enabled("cpu")
    )
    return parts if fits else None


class PartedEmbedding(nn.Embedding):
    """An embedding that can keep the gradients of parts apart."""

    def forward(self, input: Tensor) -> Tensor:
        parts = parts_of(input, self.weight)
        if parts is None or self.max_norm is not None or self.scale_grad_by_freq:
            return super().forward(input)
        weight, ids_N = self.weight, input.flatten()
        rows = embedding(input, weight.detach()).requires_grad_()

        def add(grad: Tensor) -> None:
            grad_N = grad.view(len(ids_N), -1)
            if self.padding_idx is not None:
                grad_N = grad_N.masked_fill((ids_N == self.padding_idx).unsqueeze(1), 0.0)
            parts.add(weight, lambda span, out: out.zero_().index_add_(0, ids_N[span], grad_N[span]))

        rows.register_hook(add)
        return rows
