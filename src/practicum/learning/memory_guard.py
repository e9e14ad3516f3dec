"""Out of memory on one of several ranks, so that the others are not left waiting in a collective.

Ranks gather and reduce each layer together. A rank that runs out of memory therefore continues to the end of
its pass: layers pass their input through, gradients are zeros, and the collectives stay in order. Nothing of
such a pass is used: at its end all ranks agree to do the update again with smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from practicum.devices import is_out_of_memory
from practicum.errors import PracticumError

T = TypeVar("T")


class MicrobatchTooLargeError(Exception):
    """A micro-batch of this many tokens ran out of memory."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a micro-batch of {tokens} tokens")
        self.tokens = tokens


class MemoryGuard:
    """The layers of a sharded model, whose hooks run around what is guarded here.

    A pass begins with `begin`; `tripped` is whether it ran out of memory.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.tripped = False
        self._layers, self._run = len(layers), 0
        self._last: Tensor | None = None
        self._tail: tuple[Tensor, Tensor] | None = None
        self._makes_tuple: dict[nn.Module, bool] = {}
        for layer in layers:
            layer.forward = partial(self._forward, layer, layer.forward)

    def begin(self) -> None:
        """Forget the pass before."""
        self.tripped, self._run, self._last, self._tail = False, 0, None, None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What the work gives; None if it runs out of memory."""
        try:
            return work()
        except MicrobatchTooLargeError:
            pass  # a part of it did
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.tripped = True
        return None

    def cut(self, hidden: Tensor) -> Tensor:
        """The hidden states for what comes after the layers, whose backward pass is then guarded too."""
        if not hidden.requires_grad:
            return hidden
        leaf = hidden.detach().requires_grad_()
        self._tail = leaf, hidden
        return leaf

    def joined(self, loss: Tensor | None) -> Tensor | None:
        """The loss of what `cut` gave, with its gradient to the layers."""
        if loss is None or self._tail is None:
            return loss
        leaf, hidden = self._tail
        return self._apart(loss, [leaf], [hidden])

    def rest_of_pass(self, blank: Callable[[], Any]) -> Tensor:
        """After running out of memory: a loss of zero that reaches every layer. `blank` runs all layers."""
        if self._run == 0:
            blank()
        if self._run != self._layers or self._last is None:
            raise PracticumError(between_layers())
        return 0.0 * self._last.sum()

    def _forward(
        self, layer: nn.Module, forward: Callable[..., Any], x: Tensor, *args: Any, **more: Any
    ) -> Any:
        """A layer's own forward pass, or its input if memory ran out."""
        learns = torch.is_grad_enabled() and (
            x.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
        )
        leaf = x.detach().requires_grad_(x.requires_grad) if learns else x
        out: Any = None if self.tripped else self.attempt(lambda: forward(leaf, *args, **more))
        if self.tripped:
            hidden = x
        else:
            self._makes_tuple[layer] = isinstance(out, tuple)
            hidden: Tensor = out[0] if isinstance(out, tuple) else out
        if learns:
            hidden = self._apart(hidden, [leaf], [x])
        self._run, self._last = self._run + 1, hidden
        if not self._makes_tuple.get(layer, False):
            return hidden
        return (hidden, *(out[1:] if isinstance(out, tuple) else ()))

    def _apart(self, out: Tensor, leaves: list[Tensor], inputs: list[Tensor]) -> Tensor:
        reached = torch.ones(
            (), requires_grad=True
        )  # parameters are reached even if no input needs a gradient
        return _Apart.apply(self, [out], leaves, reached, *inputs)  # pyright: ignore[reportReturnType]


class _Apart(torch.autograd.Function):
    """A piece of the graph with its own backward pass, from `out` to `leaves`, which stand for `inputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        guard: MemoryGuard,
        out: list[Tensor],
        leaves: list[Tensor],
        reached: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.guard, ctx.out, ctx.leaves = guard, out, leaves
        return out[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        guard: MemoryGuard = ctx.guard
        out, leaves = ctx.out.pop(), ctx.leaves
        if not guard.tripped:
            guard.attempt(lambda: torch.autograd.backward(out, grads[0]))
        found = [leaf.grad for leaf in leaves]
        if guard.tripped:
            found = [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
        ctx.leaves = []
        return None, None, None, None, *found


def between_layers() -> str:
    """What a rank says that can't stay in step with the others."""
    return (
        "a rank ran out of memory outside of the model's layers, where the others can't be told\n"
        "  → lower train.microbatch_tokens, set train.gradient_checkpointing, or raise pools.train.devices"
    )
