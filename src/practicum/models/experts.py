"""Record the experts of tokens in a mixture-of-experts model, and replay them in another forward pass.

Engine and learner compute equal router logits up to rounding, but near a tie they choose different experts,
and logprobs differ by more than rounding. Replaying the engine's experts in the learner prevents this. A
router can be replayed if a `Rule` reproduces its weights. Others are neither recorded nor replayed. The state
is stored on the routers rather than in a thread, because a backward pass may recompute a layer in another
thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from practicum.compat.transformers import grouped_mm_experts_forward, register_experts
from practicum.cpu.batch_invariance import LANES, ROWS, is_even, mlp_width, padded_tokens
from practicum.errors import EngineError

_HOOK = "practicum_routes"
_TOLERANCE = 1e-4
"""Largest difference of a router's own weights from a rule's, as a fraction of the largest."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a router weighs the experts of a token, and where its output has logits, weights and indices."""

    sigmoid: bool
    """Scores are sigmoids of the logits (DeepSeek-V3, GLM-4.5), not their softmax (Qwen3-MoE, Mixtral)."""
    normed: bool
    """Weights of the chosen experts add up to 1, before the scale."""
    scale: float
    order: tuple[int, int, int]

    def weights(self, logits: Tensor, indices: Tensor) -> Tensor:
        """Return the weights [N, E] of given experts. What only decides the choice has no part in them:
        a correction bias, groups of experts."""
        if self.sigmoid:
            scores = logits.float().sigmoid()
        else:
            scores = torch.softmax(logits, dim=-1, dtype=torch.float)
        weights = scores.gather(-1, indices)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights if self.scale == 1.0 else weights * self.scale


@dataclass(eq=False, slots=True)
class _RouterHook:
    """Recording and replay of a router's choices."""

    layer: int
    rule: Rule
    width: int = LANES
    """Width of the model's layers, which determines the padding of packed tokens."""
    taken: list[Tensor] | None = None
    replay: Tensor | None = None
    """Experts to replay [N, E]. -1 is the router's choice."""
    moved: RouteChanges | None = None


@dataclass(eq=False, slots=True)
class RecordedRoutes:
    """Recorded experts."""

    layers: list[list[Tensor]]

    def tensor(self) -> Tensor:
        """Return [N, L, E] int64, tokens in the order of the forward calls, with the padding of each."""
        return torch.stack([torch.cat(calls) for calls in self.layers], dim=1)


@dataclass(eq=False, slots=True)
class RouteChanges:
    """The router's choices in a forward pass with replayed experts."""

    layers: dict[int, Tensor] = field(default_factory=dict)

    def share(self) -> float:
        """Return the share of (token, layer) whose own choice would have been another set of experts."""
        if not self.layers:
            raise EngineError("no forward was run while experts were replayed")
        return float(torch.stack([*self.layers.values()]).double().mean())


class Routes:
    """The routers of one model, by layer. One forward at a time uses a model."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self._routers = routers
        self._hooks: list[_RouterHook] = [getattr(router, _HOOK) for router in routers]
        first: Any = routers[0]
        self.layers, self.per_token, self.experts = len(routers), int(first.top_k), int(first.num_experts)

    @contextmanager
    def record(self) -> Iterator[RecordedRoutes]:
        """Record the experts of each token in forward passes inside the context."""
        taken = RecordedRoutes([[] for _ in self._hooks])
        for hook, calls in zip(self._hooks, taken.layers, strict=True):
            hook.taken = calls
        try:
            yield taken
        finally:
            for hook in self._hooks:
                hook.taken = None

    @contextmanager
    def replay(self, experts_NLE: Tensor) -> Iterator[RouteChanges]:
        """Replay these experts in the forward pass inside the context, weighted by the routers'
        probabilities.

        Tokens with -1 use the router's choice. With recomputed activations, the backward pass must be inside
        too.
        """
        if experts_NLE.shape[1:] != (self.layers, self.per_token):
            raise EngineError(
                f"experts to replay are {list(experts_NLE.shape)}, expected tokens x {self.layers} layers "
                f"x {self.per_token} experts"
            )
        moved = RouteChanges()
        experts = experts_NLE.to(cast(Tensor, self._routers[0].weight).device).unbind(1)
        for hook, replay in zip(self._hooks, experts, strict=True):
            hook.replay, hook.moved = replay, moved
        try:
            yield moved
        finally:
            for hook in self._hooks:
                hook.replay = hook.moved = None


def _padded_experts(module: Any, hidden_N: Tensor, index_NE: Tensor, weights_NE: Tensor) -> Tensor:
    """Compute transformers' grouped products with a multiple of ROWS tokens for each expert. Tokens of 0 with
    weights of 0 fill them up: see `cpu/batch_invariance.py`."""
    tokens, per_token = index_NE.shape
    missing_X = -index_NE.flatten().bincount(minlength=module.num_experts) % ROWS
    more = torch.arange(module.num_experts, device=index_NE.device).repeat_interleave(missing_X)
    # As many as tokens of `per_token` experts have, and as the activation between the products asks for.
    least, width = index_NE.numel() + len(more), module.down_proj.shape[1 if module.is_transposed else 2]
    totals = count(least, ROWS)
    total = next(n for n in totals if n % per_token == 0 and is_even(n, width))
    more = pad(more, (0, total - least))
    rows = len(more) // per_token
    padded_NH, padded_NE = (pad(x, (0, 0, 0, rows)) for x in (hidden_N, weights_NE))
    index_NE = torch.cat([index_NE, more.view(rows, per_token)])
    return grouped_mm_experts_forward(module, padded_NH, index_NE, padded_NE)[:tokens]


register_experts(_padded_experts)


def routes_of(model: nn.Module) -> Routes | None:
    """Return the model's routers, prepared the first time, or None if it has none that can be replayed."""
    routers = [module for module in model.modules() if _is_router(module)]
    rules = [getattr(r, _HOOK).rule if hasattr(r, _HOOK) else _rule_of(r) for r in routers]
    if not routers or None in rules:
        return None
    for layer, (router, rule) in enumerate(zip(routers, rules, strict=True)):
        if rule is not None and not hasattr(router, _HOOK):
            setattr(router, _HOOK, _RouterHook(layer, rule, mlp_width(model)))
            # A hook, not another forward: a copy of the model calls it with the copied router.
            router.register_forward_hook(_routed)
    return Routes(routers)


def _is_router(module: nn.Module) -> bool:
    """Return True for a layer that scores `num_experts` experts and picks `top_k` of them."""
    if hasattr(module, _HOOK):  # its weights may be offloaded
        return True
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and weight.shape[0] == getattr(module, "num_experts", None)
        and isinstance(getattr(module, "top_k", None), int)
    )


@torch.no_grad()
def _rule_of(router: Any) -> Rule | None:
    """Return the rule that reproduces the router's own weights, or None if none does.

    Tried with made-up weights (its own may not be loaded yet), whose logits are large enough to tell rules
    apart, and with a correction bias of experts that is not 0.
    """
    random = torch.Generator().manual_seed(0)
    named = (*router.named_parameters(), *router.named_buffers())
    tensors = {name: torch.randn(x.shape, generator=random) for name, x in named}
    width = router.weight.shape[1]
    tokens = torch.randn(8, width, generator=random) * 4.0 / width**0.5
    try:
        output = functional_call(router, tensors, (tokens,))
    except (TypeError, RuntimeError, ValueError):  # it takes more than hidden states
        return None
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    scales = {1.0, *(x for x in vars(router).values() if isinstance(x, float))}
    orders, both = ((0, 1, 2), (2, 1, 0)), (False, True)
    for order, sigmoid, normed, scale in product(orders, both, reversed(both), sorted(scales)):
        logits, weights, indices = (output[i] for i in order)
        if indices.dtype != torch.int64 or logits.shape != (8, router.num_experts):
            continue
        found = Rule(sigmoid, normed, scale, order)
        if (found.weights(logits, indices) - weights).abs().max() <= _TOLERANCE * weights.abs().max():
            return found
    return None


def _routed(router: nn.Module, args: Any, output: Any) -> tuple[Tensor, ...] | None:
    """Return a router's output with replayed experts, or None to leave it unchanged."""
    hook: _RouterHook = getattr(router, _HOOK)
    if hook.taken is None and hook.replay is None:
        return None
    logits, weights, indices = (output[i] for i in hook.rule.order)
    if hook.replay is not None:
        replay, chosen = hook.replay, indices
        tokens = len(replay)
        if len(chosen) not in (tokens, padded_tokens(tokens, hook.width)):
            raise EngineError(f"experts of {tokens} tokens are replayed in a forward of {len(chosen)}")
        replay = pad(replay, (0, 0, 0, len(chosen) - tokens), value=-1)
        indices = torch.where(replay < 0, chosen, replay)
        weights = hook.rule.weights(logits, indices).to(weights.dtype)
        if hook.moved is not None:
            differs = (indices.sort(-1).values != chosen.sort(-1).values).any(-1)[:tokens]
            hook.moved.layers[hook.layer] = differs.detach()
    if hook.taken is not None:
        hook.taken.append(indices.detach())
    return tuple((logits, weights, indices)[i] for i in hook.rule.order)
