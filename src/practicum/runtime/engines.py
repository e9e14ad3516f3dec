"""The student's engine, by the kind that the recipe names."""

from __future__ import annotations

import copy
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from practicum.models.load import context_length
from practicum.recipe.schema import Recipe
from practicum.rollout.protocol import Engine
from practicum.rollout.torch_engine import TorchEngine

GIB = 2**30
_BLOCK = 128
"""Tokens of a block of vLLM's KV memory on a CPU, the largest there is."""


def rollout_context(recipe: Recipe, model_context: int | None) -> int:
    """Tokens of KV memory for one sequence: the recipe's, else 1,024 of prompt and the answer."""
    if recipe.rollout.context is not None:
        return recipe.rollout.context
    needed = 1024 + recipe.rollout.max_new_tokens
    return needed if model_context is None else min(needed, model_context)


def make_engine(recipe: Recipe, model: PreTrainedModel) -> Engine:
    """The engine that samples the student's answers, with the weights that the model has now.

    The torch engine samples with the model object itself; vLLM has a copy of its weights.
    """
    rollout = recipe.rollout
    context = rollout_context(recipe, context_length(model))
    if rollout.engine == "torch":
        return TorchEngine(model, slots=rollout.slots, context=context, keep_tokens=rollout.keep_tokens)
    engine = _vllm(recipe, model, context)
    try:
        engine.load_weights(model.named_parameters(), engine.version)
    except BaseException:
        engine.close()
        raise
    return engine


def _vllm(recipe: Recipe, model: PreTrainedModel, context: int) -> Engine:
    from practicum.rollout.vllm.engine import VllmEngine
    from practicum.rollout.vllm.setup import VllmSetup

    rollout, chosen = recipe.rollout, recipe.rollout.vllm
    kv = chosen.kv_gb * GIB if chosen.kv_gb is not None else kv_bytes(model, rollout.slots, context)
    folder = TemporaryDirectory(prefix="practicum-vllm-")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # a model that was made here has none
    config.save_pretrained(folder.name)
    setup = VllmSetup(
        model=folder.name,
        dtype=str(model.dtype).removeprefix("torch."),
        context=context,
        slots=rollout.slots,
        kv_bytes=int(kv),
        max_logprobs=1,
        threads=chosen.threads or torch.get_num_threads(),
        options=chosen.options,
    )
    return VllmEngine(setup, start_s=chosen.start_s, folder=folder)


def kv_bytes(model: PreTrainedModel, slots: int, context: int) -> int:
    """KV memory in which so many sequences of so many tokens have room, in whole blocks."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return token * _BLOCK * (slots * -(-context // _BLOCK) + 1)
