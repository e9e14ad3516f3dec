"""vLLM engines as recipes describe them: from a model in this process, or from a folder that vLLM reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.vllm.vllm_engine import VllmEngine, Weights
from practicum.engines.vllm.vllm_messages import ADAPTED_LAYERS, RANKS, VllmSetup
from practicum.models.adapter_files import write_adapter
from practicum.models.adapter_rows import bare_base
from practicum.models.lora import adapter_config, has_adapter
from practicum.models.model_files import read_config
from practicum.models.saved_adapter import SavedAdapter
from practicum.recipe.schema.rollout_sections import Vllm

GIB = 2**30
_ADAPTED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_BLOCK = 32
"""Tokens of a block of KV memory on a CPU, the largest there is."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What an engine must have room for: `slots` sequences at once, `kv_tokens` in all; and its settings.

    `key` is its section of the recipe, `chosen` what that says of vLLM; `threads`: if it does not say any.
    """

    key: str
    chosen: Vllm
    threads: int
    context: int
    slots: int
    kv_tokens: int
    max_logprobs: int = 1
    samples: bool = True
    """Whether answers are sampled, or tokens scored alone."""
    batch_tokens: int | None = None
    """Tokens of one forward pass; vLLM's own choice if not given."""


def engine_of_model(
    model: PreTrainedModel,
    room: EngineSize,
    weights: Callable[[], tuple[Weights, int]],
    *,
    wait: bool = True,
) -> VllmEngine:
    """An engine for a model of this shape, with what `weights` gives."""
    folder = TemporaryDirectory(prefix="practicum-vllm-")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # a model that was not loaded from a folder has none
    config.save_pretrained(folder.name)
    setup = _setup(folder.name, model.dtype, config, room)
    return VllmEngine(setup, start_s=room.chosen.start_s, weights=weights, folder=folder, wait=wait)


def takes_adapter(model: PreTrainedModel) -> bool:
    """Whether vLLM computes this model's adapter beside its base; else it gets weights that are merged.

    Not those of experts, which PEFT saves in a form of its own, and of families that were not tried.
    """
    return (
        has_adapter(model)
        and model.config.model_type in _ADAPTED_FAMILIES
        and adapter_config(model).r <= RANKS[-1]
    )


def vllm_adapter_problem(saved: SavedAdapter, family: str) -> str | None:
    """Why vLLM would not compute an adapter of a model of this family as it was trained; None if it does."""
    if family not in _ADAPTED_FAMILIES:
        return f"an adapter of a {family} model (those of {', '.join(sorted(_ADAPTED_FAMILIES))} were tried)"
    if (rank := saved.config.get("r", 0)) > RANKS[-1]:
        return f"an adapter of rank {rank}, above {RANKS[-1]}"
    if other := next((key for key in ("rank_pattern", "alpha_pattern") if saved.config.get(key)), None):
        return f"an adapter with {other}, which vLLM does not read"
    layers = (name.partition(".lora_")[0] for name in saved.shapes)
    odd = next((layer for layer in layers if layer.rpartition(".")[2] not in ADAPTED_LAYERS), None)
    return None if odd is None else f"an adapter on {odd}, which vLLM leaves out"


def engine_of_adapted(
    model: PreTrainedModel,
    path: str | None,
    room: EngineSize,
    weights: Callable[[], tuple[Weights, int]],
) -> VllmEngine:
    """An engine for a model with an adapter (`takes_adapter`): vLLM reads the base, and adapters are sent.

    `path` is the folder or hub name of the base; one that was made is written for vLLM.
    """
    folder, source = None, path
    if source is None:
        folder = TemporaryDirectory(prefix="practicum-vllm-")
        source = folder.name
        bare_base(model).save_pretrained(source)
    setup = _setup(source, model.dtype, model.config, room, loads=True)
    setup = replace(setup, rank=adapter_config(model).r, keeps_weights=True)

    def write(to: Path, adapter: Mapping[str, Tensor]) -> None:
        write_adapter(to, model, adapter, base="")

    start_s = room.chosen.start_s
    return VllmEngine(setup, start_s=start_s, weights=weights, folder=folder, write_adapter=write)


def engine_of_folder(
    path: str,
    dtype: torch.dtype,
    room: EngineSize,
    *,
    wait: bool = True,
    adapters: Sequence[SavedAdapter] = (),
) -> VllmEngine:
    """An engine with the weights of a folder or hub name; they never pass through this process.

    It has room for these adapters, which `take_adapter` gives it.
    """
    setup = _setup(path, dtype, read_config(path), room, loads=True)
    if adapters:
        setup = replace(setup, rank=max(saved.config["r"] for saved in adapters), adapters=len(adapters))
    return VllmEngine(setup, start_s=room.chosen.start_s, wait=wait)


def _setup(
    model: str, dtype: torch.dtype, config: Any, room: EngineSize, *, loads: bool = False
) -> VllmSetup:
    chosen, parallel = room.chosen, room.chosen.tensor_parallel
    kv = (
        chosen.kv_gb * GIB
        if chosen.kv_gb is not None
        else kv_bytes(config, dtype, room.slots, room.kv_tokens, parallel)
    )
    batch = {} if room.batch_tokens is None else {"max_num_batched_tokens": room.batch_tokens}
    return VllmSetup(
        where=room.key,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        context=room.context,
        slots=room.slots,
        kv_bytes=int(kv),
        max_logprobs=room.max_logprobs,
        threads=chosen.threads or room.threads,
        loads=loads,
        samples=room.samples,
        tensor_parallel=parallel,
        options=batch | chosen.options,
    )


def kv_bytes(config: Any, dtype: torch.dtype, slots: int, kv_tokens: int, parallel: int = 1) -> int:
    """KV memory of each device for this many tokens, in blocks: each sequence has one that is not
    full."""
    return kv_token_bytes(config, dtype, parallel) * _BLOCK * (-(-kv_tokens // _BLOCK) + slots + 1)


def kv_token_bytes(config: Any, dtype: torch.dtype, parallel: int = 1) -> int:
    """Bytes that one token's keys and values take in all layers, on each of the devices that share them."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // parallel) * width * dtype.itemsize
