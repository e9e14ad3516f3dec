"""Which experts tokens take in a mixture-of-experts model: recorded in one forward, replayed in another.

An engine and a learner compute the same router logits up to rounding, and near a tie they pick other experts:
then their logprobs differ by more than rounding. A learner that replays the engine's experts does not.
Routers are those that return (logits, weights, indices), as Qwen3-MoE's. What is recorded and replayed sits
on them, not in a thread: a backward pass may recompute a layer in another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.functional import pad
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from practicum.errors import EngineError
from practicum.models.batch_invariance import LANES, ROWS, mlp_width, padded_tokens

IMPLEMENTATION = "practicum"
_SEAT = "practicum_seat"
_TOLERANCE = 1e-2
"""Largest difference of a router's own weights from ours: number types differ, rules would differ by more."""


@dataclass(eq=False, slots=True)
class _RouterHook:
    """What a router is asked to do beside its work."""

    layer: int = 0
    width: int = LANES
    """How wide the model's layers are, by which packed tokens are padded."""
    taken: RecordedRoutes | None = None
    replay: Tensor | None = None
    """Experts to take [N, E]; -1: the router's own choice."""
    moved: RouteChanges | None = None


@dataclass(eq=False, slots=True)
class RecordedRoutes:
    """Experts that tokens took, while they are recorded."""

    layers: list[list[Tensor]]

    def tensor(self) -> Tensor:
        """[N, L, E] int64, tokens in the order of the forward calls, with the padding of each."""
        return torch.stack([torch.cat(calls) for calls in self.layers], dim=1)


@dataclass(eq=False, slots=True)
class RouteChanges:
    """How a forward with replayed experts would have chosen by itself."""

    layers: dict[int, Tensor] = field(default_factory=dict)

    def share(self) -> float:
        """The share of (token, layer) whose own choice would have been another set of experts."""
        if not self.layers:
            raise EngineError("no forward was run while experts were replayed")
        return float(torch.stack([*self.layers.values()]).double().mean())


class Routes:
    """The routers of one model, by layer. One forward at a time uses a model."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self._routers = routers
        self._seats: list[_RouterHook] = [getattr(router, _SEAT) for router in routers]
        first: Any = routers[0]
        self.layers, self.per_token, self.experts = len(routers), int(first.top_k), int(first.num_experts)

    @contextmanager
    def record(self) -> Iterator[RecordedRoutes]:
        """Note which experts each token of the forward calls inside takes."""
        taken = RecordedRoutes([[] for _ in self._seats])
        for seat in self._seats:
            seat.taken = taken
        try:
            yield taken
        finally:
            for seat in self._seats:
                seat.taken = None

    @contextmanager
    def replay(self, experts_NLE: Tensor) -> Iterator[RouteChanges]:
        """The forward inside takes these experts, weighted by the routers' own probabilities of them.

        A token with -1 takes those that its router chooses. If activations are recomputed in the backward
        pass, that belongs inside too.
        """
        if experts_NLE.shape[1:] != (self.layers, self.per_token):
            raise EngineError(
                f"experts to replay are {list(experts_NLE.shape)}, expected tokens x {self.layers} layers "
                f"x {self.per_token} experts"
            )
        if not self.can_replay:
            raise EngineError(
                f"{type(self._routers[0]).__name__} weighs its experts in another way than by their softmax "
                "probabilities: set train.replay_experts to false"
            )
        moved = RouteChanges()
        experts = experts_NLE.to(cast(Tensor, self._routers[0].weight).device).unbind(1)
        for seat, replay in zip(self._seats, experts, strict=True):
            seat.replay, seat.moved = replay, moved
        try:
            yield moved
        finally:
            for seat in self._seats:
                seat.replay = seat.moved = None

    @cached_property
    def can_replay(self) -> bool:
        """Whether the routers weigh experts as we do: found out once, on made-up tokens."""
        router: Any = self._routers[0]
        # Ranks that have shards of it ask together.
        own = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in router.named_parameters()}
        with torch.no_grad():
            tokens = torch.eye(4, router.weight.shape[1]).to(own["weight"])
            logits, weights, indices = functional_call(router, own, (tokens,))
            return bool((_weights(router, logits, indices) - weights).abs().max() <= _TOLERANCE)


def _padded_experts(module: Any, hidden_N: Tensor, index_NE: Tensor, weights_NE: Tensor) -> Tensor:
    """transformers' grouped products, with a multiple of ROWS tokens for each expert: see `batch_invariance`.

    Tokens of 0 with weights of 0 fill them up.
    """
    tokens, per_token = index_NE.shape
    missing_X = -index_NE.flatten().bincount(minlength=module.num_experts) % ROWS
    more = torch.arange(module.num_experts, device=index_NE.device).repeat_interleave(missing_X)
    # As many as tokens of `per_token` experts have, and as the activation between the products asks for.
    least, width = index_NE.numel() + len(more), module.down_proj.shape[1 if module.is_transposed else 2]
    totals = count(least, ROWS)
    total = next(n for n in totals if n % per_token == 0 and padded_tokens(n, width) == n)
    more = pad(more, (0, total - least))
    rows = len(more) // per_token
    padded_NH, padded_NE = (pad(x, (0, 0, 0, rows)) for x in (hidden_N, weights_NE))
    index_NE = torch.cat([index_NE, more.view(rows, per_token)])
    return grouped_mm_experts_forward(module, padded_NH, index_NE, padded_NE)[:tokens]


ExpertsInterface.register(IMPLEMENTATION, _padded_experts)


def routes_of(model: nn.Module) -> Routes | None:
    """The routers of a model, prepared the first time; None if it has none."""
    routers = [module for module in model.modules() if _is_router(module)]
    for layer, router in enumerate(routers):
        if not hasattr(router, _SEAT):
            setattr(router, _SEAT, _RouterHook(layer, mlp_width(model)))
            # A hook, not another forward: a copy of the model calls it with the copied router.
            router.register_forward_hook(_routed)
    return Routes(routers) if routers else None


def _is_router(module: nn.Module) -> bool:
    """A layer that scores `num_experts` experts and picks `top_k` of them."""
    if hasattr(module, _SEAT):  # its weights may be offloaded just now
        return True
    weight, count = getattr(module, "weight", None), getattr(module, "num_experts", None)
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and weight.shape[0] == count
        and isinstance(getattr(module, "top_k", None), int)
    )


def _routed(router: nn.Module, args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """A router's output, with replayed experts in place of its own; None leaves it as it is."""
    seat: _RouterHook = getattr(router, _SEAT)
    if seat.taken is None and seat.replay is None:
        return None
    if not isinstance(output, tuple) or len(output) != 3:
        raise EngineError(
            f"{type(router).__name__} does not return (logits, weights, indices), so the experts that "
            "tokens take can't be recorded"
        )
    logits, weights, indices = output
    if seat.replay is not None:
        given, own = seat.replay, indices
        tokens = len(given)
        if len(own) not in (tokens, padded_tokens(tokens, seat.width)):
            raise EngineError(f"experts of {tokens} tokens are replayed in a forward of {len(own)}")
        given = pad(given, (0, 0, 0, len(own) - tokens), value=-1)
        indices = torch.where(given < 0, own, given)
        weights = _weights(router, logits, indices).to(weights.dtype)
        if seat.moved is not None:
            differs = (indices.sort(-1).values != own.sort(-1).values).any(-1)[:tokens]
            seat.moved.layers[seat.layer] = differs.detach()
    if seat.taken is not None:
        seat.taken.layers[seat.layer].append(indices.detach())
    return logits, weights, indices


def _weights(router: Any, logits: Tensor, indices: Tensor) -> Tensor:
    """The router's own probabilities of given experts, renormalised if it does so."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, indices)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)
