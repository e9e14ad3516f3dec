"""One of two ranks runs out of memory, in each part of a pass; the other never knows but by agreement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.learning import learner as learner_module
from practicum.learning.learner import Learner
from practicum.learning.parallel import Parallel
from practicum.recipe.schema.algorithm_sections import Algorithm

from .ranks import TRAIN, Found, case, on_rank, uneven
from .reference import adapted, random_batch, tiny

ROOM = 60
"""Tokens of a micro-batch that the rank has memory for."""
WIDE = TRAIN.model_copy(update={"microbatch_tokens": 10_000})


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int) -> Tensor:
        ctx.tokens = tokens
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _need_room(ctx.tokens)
        return grads[0], None


def _need_room(tokens: int) -> None:
    if tokens > ROOM:
        raise torch.OutOfMemoryError("no memory left")


def _in_forward(patch: pytest.MonkeyPatch, module: Any) -> None:
    forward = module.forward

    def limited(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = forward(x, *args, **kwargs)
        _need_room(x.shape[-1] if x.dtype == torch.long else x.shape[-2])
        return out

    patch.setattr(module, "forward", limited)


def _in_backward(patch: pytest.MonkeyPatch, module: Any) -> None:
    forward = module.forward
    patch.setattr(module, "forward", lambda x: forward(_FailsBackward.apply(x, x.shape[-2])))


def _in_loss(patch: pytest.MonkeyPatch, model: Any, *, backward: bool) -> None:
    embedding, logprobs, tokens = model.model.embed_tokens, learner_module.token_logprobs, [0]
    embed = embedding.forward

    def counted(ids: Tensor) -> Tensor:
        tokens[0] = ids.shape[-1]
        return embed(ids)

    def limited(model: Any, hidden_M: Tensor, *args: Any, **kwargs: Any) -> Any:
        if backward:
            hidden_M = _FailsBackward.apply(hidden_M, tokens[0])  # pyright: ignore[reportAssignmentType]
        else:
            _need_room(tokens[0])
        return logprobs(model, hidden_M, *args, **kwargs)

    patch.setattr(embedding, "forward", counted)
    patch.setattr(learner_module, "token_logprobs", limited)


PLACES: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "embedding": lambda patch, model: _in_forward(patch, model.model.embed_tokens),
    "layer": lambda patch, model: _in_forward(patch, model.model.layers[0].mlp),
    "layer_backward": lambda patch, model: _in_backward(patch, model.model.layers[1].mlp),
    "loss": lambda patch, model: _in_loss(patch, model, backward=False),
    "loss_backward": lambda patch, model: _in_loss(patch, model, backward=True),
}


def _update(parallel: Parallel | None, model: PreTrainedModel, place: str, **train: Any) -> Found:
    """Two updates; the first finds the size, which the second has."""
    learner = Learner(model, WIDE.model_copy(update=train), Algorithm(loss="ppo_clip"), parallel=parallel)
    found, halved = Found(), []
    with pytest.MonkeyPatch.context() as patch:
        if parallel is not None and parallel.rank == 0:
            PLACES[place](patch, model)
        for seed in (3, 4):
            batch = random_batch(seed)
            metrics = learner.update(on_rank(batch, uneven(len(batch.sessions)), parallel))
            halved.append(metrics.pop("microbatch_halved", 0))
            found.metrics.append(metrics)
    if parallel is not None:
        assert halved[0] >= 1, f"{place}: {halved}"
        assert halved[1] == 0
        assert learner.trunk.token_budget < 2 * ROOM
    found.keep(learner.model, learner.stepper)
    return found


@case
def memory_runs_out(parallel: Parallel | None, folder: Path) -> Found:
    """In each place, one after the other."""
    found = Found()
    for place in PLACES:
        one = _update(parallel, tiny(), place)
        found.metrics += one.metrics
        found.tensors |= {f"{place}.{name}": tensor for name, tensor in one.tensors.items()}
    return found


@case
def memory_runs_out_beside_an_adapter(parallel: Parallel | None, folder: Path) -> Found:
    return _update(parallel, adapted(), "layer")


@case
def memory_runs_out_in_recomputed_layers(parallel: Parallel | None, folder: Path) -> Found:
    return _update(parallel, tiny(), "layer_backward", gradient_checkpointing=True)
