"""vLLM engines as recipes describe them: from a model in this process, or from a folder that vLLM reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.compat.peft import adapter_config
from practicum.engines.kind import FrozenModel, Weights, WeightSource
from practicum.engines.protocol import Engine
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.engines.vllm.vllm_setup import ADAPTED_LAYERS, RANKS, VllmSetup
from practicum.errors import RecipeError
from practicum.models.adapter_files import SavedAdapter, write_adapter
from practicum.models.load_model import context_length, load_model, skeleton
from practicum.models.lora import bare_base, base_fingerprint, has_adapter
from practicum.models.model_files import read_config
from practicum.recipe.schema.engine_sections import Vllm
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.recipe.schema.teacher_sections import Own

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
    weights: WeightSource,
    *,
    wait: bool = True,
) -> VllmEngine:
    """An engine for a model of this shape, with what `weights` gives."""
    folder = TemporaryDirectory(prefix="practicum-vllm-")
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # a model that was not loaded from a folder has none
    config.save_pretrained(folder.name)
    setup = _setup(folder.name, model.dtype, config, room)
    return VllmEngine(setup, weights=weights, folder=folder, wait=wait)


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
    weights: WeightSource,
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

    return VllmEngine(setup, weights=weights, folder=folder, write_adapter=write)


def engine_of_folder(
    path: str,
    dtype: torch.dtype,
    room: EngineSize,
    *,
    wait: bool = True,
    adapters: Sequence[SavedAdapter] = (),
    folder: TemporaryDirectory[str] | None = None,
) -> VllmEngine:
    """An engine with the weights of a folder or hub name; they never pass through this process."""
    setup = _setup(path, dtype, read_config(path), room, loads=True)
    if adapters:
        setup = replace(setup, rank=max(saved.config["r"] for saved in adapters), adapters=len(adapters))
    return VllmEngine(setup, adapters=adapters, folder=folder, wait=wait)


def _setup(
    model: str, dtype: torch.dtype, config: Any, room: EngineSize, *, loads: bool = False
) -> VllmSetup:
    chosen, parallel = room.chosen, room.chosen.tensor_parallel
    batch = {} if room.batch_tokens is None else {"max_num_batched_tokens": room.batch_tokens}
    return VllmSetup(
        where=room.key,
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        context=room.context,
        slots=room.slots,
        kv_bytes=kv_bytes(config, dtype, room.slots, room.kv_tokens, parallel),
        max_logprobs=room.max_logprobs,
        threads=room.threads,
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


_SCORED_SLOTS = 64
"""Sequences that vLLM scores side by side; batch_tokens is what bounds its memory."""
_UNDECLARED = 8192
"""Longest sequence in tokens for a model that does not declare one."""


class VllmKind:
    """See `engines.kind.EngineKind`."""

    shares_model = hosts_lag = False

    def for_rollout(
        self, rollout: Rollout, path: str | None, model: PreTrainedModel, weights: WeightSource
    ) -> Engine:
        context = rollout.context_for(context_length(model))
        threads, slots = torch.get_num_threads(), rollout.slots
        room = EngineSize("rollout", rollout.vllm, threads, context, slots, kv_tokens=slots * context)
        if takes_adapter(model):
            return engine_of_adapted(model, path, room, weights)
        return engine_of_model(model, room, weights)

    def share_order(self, engines: Sequence[Engine]) -> None:
        """vLLM's processes compete as the system lets them."""

    def merges_adapter(self, model: PreTrainedModel) -> bool:
        return has_adapter(model) and not takes_adapter(model)

    def adapter_problem(self, saved: SavedAdapter, family: str) -> str | None:
        return vllm_adapter_problem(saved, family)

    def for_scoring(self, model: FrozenModel) -> Engine:
        engine = _scoring_engine(model, torch.get_num_threads())
        engine.ready()
        return engine

    def in_own_process(self, model: FrozenModel, own: Own) -> list[Engine]:
        return [_scoring_engine(model, own.threads) for _ in range(own.replicas)]


def _scoring_engine(model: FrozenModel, threads: int) -> VllmEngine:
    """Return an engine that is not ready yet; an adapter of another base is refused before."""
    student, held = model.student, model.held
    if held is not None:
        if student is None:  # a Ray actor has no student: its copy starts from the same weights
            student = load_model(model.spec, model.seed, key=model.model_key)
        start = {name: tensor.detach().cpu().clone() for name, tensor in student.named_parameters()}

        def weights() -> tuple[Weights, int]:
            return (start if held.weights is None else held.weights).items(), held.version

        return engine_of_model(student, _scoring_size(model, student.config, threads), weights, wait=False)
    folder = _check_adapters(model) if model.adapters else None
    source = model.spec.path if folder is None else folder.name
    assert source is not None
    size = _scoring_size(model, read_config(source), threads)
    dtype = getattr(torch, model.spec.dtype)
    return engine_of_folder(source, dtype, size, wait=False, adapters=model.adapters, folder=folder)


def _scoring_size(model: FrozenModel, config: Any, threads: int) -> EngineSize:
    """The context has one token more than the longest row, because vLLM always samples one."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = (model.context or min(longest or _UNDECLARED, _UNDECLARED)) + 1
    context = context if longest is None else min(context, longest)
    return EngineSize(
        model.key,
        model.settings.vllm,
        threads,
        context,
        _SCORED_SLOTS,
        kv_tokens=max(context, model.batch_tokens),
        max_logprobs=max(1, model.top_k),
        samples=False,
        batch_tokens=model.batch_tokens,
    )


def _check_adapters(model: FrozenModel) -> TemporaryDirectory[str] | None:
    """Refuse adapters of another base. Returns a folder with the base, if it has none.

    To compare weights they are loaded here for a moment, unless they are the student's own.
    """
    bare, is_made = skeleton(model.spec), model.spec.path is None
    for saved in model.adapters:
        if (problem := vllm_adapter_problem(saved, bare.config.model_type)) is not None:
            raise RecipeError(f"{model.key}.engine", f"vllm with {problem}", "torch")
        saved.check_fits(bare, model.about)
    base = model.student if model.student is not None and has_adapter(model.student) else None
    if base is None and (is_made or any(saved.base is not None for saved in model.adapters)):
        kind = {"device": "cpu"} if is_made else {"device": "cpu", "dtype": "bfloat16"}
        base = load_model(model.spec.model_copy(update=kind), model.seed, key=model.model_key)
    if base is not None:
        fingerprint = base_fingerprint(base)
        for saved in model.adapters:
            saved.check_base(fingerprint, model.about)
    if not is_made:
        return None
    assert base is not None
    folder = TemporaryDirectory(prefix="practicum-vllm-")
    bare_base(base).save_pretrained(folder.name)
    return folder
