"""Create vLLM engines from recipes: from a model in this process, or a folder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from practicum.compat.peft import adapter_config
from practicum.engines.kind import FrozenModel, Weights, WeightSource
from practicum.engines.protocol import Engine
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.engines.vllm.vllm_setup import ADAPTED_LAYERS, INSTALL, RANKS, VllmSetup
from practicum.models.adapter_files import SavedAdapter, write_adapter
from practicum.models.load_model import context_length, load_model, skeleton
from practicum.models.lora import bare_base, base_fingerprint, has_adapter, merged_weights
from practicum.models.model_files import read_config
from practicum.models.state_layers import count_memory, seam_of
from practicum.recipe.schema.engine_sections import EngineChoice
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.recipe.schema.teacher_sections import Own

_ADAPTED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model families with tested adapters."""
_BLOCK = 32
"""Tokens per block of KV memory on a CPU, where blocks are largest."""
_SCORED_SLOTS = 64
"""Maximum sequences to score concurrently. batch_tokens limits the memory."""
_UNDECLARED = 8192
"""Maximum sequence length of a model that does not declare one."""


class VllmKind:
    """See `engines.kind.EngineKind`."""

    shares_model = hosts_lag = False
    module, install = "vllm", INSTALL
    recurrent = "falcon_h1, nemotron_h without experts, and granitemoehybrid and mamba2 with one group"

    def runs_recurrent(self, config: PreTrainedConfig) -> bool:
        """Return True for models whose logprobs were compared with those of transformers."""
        match config.model_type:
            case "falcon_h1":
                return True
            case "nemotron_h":
                return "moe" not in config.layers_block_type
            case "granitemoehybrid":  # vLLM normalizes each group by itself, transformers all together
                return config.mamba_n_groups == 1
            case "mamba2":
                return config.n_groups == 1
        return False

    def for_rollout(
        self, rollout: Rollout, path: str | None, model: PreTrainedModel, weights: WeightSource
    ) -> Engine:
        slots, context = rollout.max_num_seqs, rollout.context_for(context_length(model))
        folder = TemporaryDirectory(prefix="practicum-vllm-")
        more: dict[str, Any] = {"context": context, "slots": slots, "threads": torch.get_num_threads()}
        if self.takes_adapter(model):  # vLLM reads the base, and adapters are sent
            if path is None:
                bare_base(model).save_pretrained(folder.name)
            more |= {"loads": True, "rank": adapter_config(model).r, "keeps_weights": True}
        else:
            path = _write_config(model, folder.name)
        model_of = (path or folder.name, model.config, model.dtype)
        return VllmEngine(
            _setup("rollout", rollout, *model_of, kv_tokens=slots * context, **more),
            weights=weights,
            folder=folder,
            write_adapter=(lambda to, adapter: write_adapter(to, model, adapter, base=""))
            if self.takes_adapter(model)
            else None,
        )

    def share_order(self, engines: Sequence[Engine]) -> None:
        """Do nothing, as the system schedules vLLM's processes."""

    def takes_adapter(self, model: PreTrainedModel) -> bool:
        """Return True if vLLM can compute this model's adapter unmerged.

        It can't for experts, whose adapters PEFT saves in another format.
        """
        return (
            has_adapter(model)
            and model.config.model_type in _ADAPTED_FAMILIES
            and adapter_config(model).r <= RANKS[-1]
        )

    def merges_adapter(self, model: PreTrainedModel) -> bool:
        return has_adapter(model) and not self.takes_adapter(model)

    def adapter_problem(self, saved: SavedAdapter, family: str) -> str | None:
        if family not in _ADAPTED_FAMILIES:
            tried = ", ".join(sorted(_ADAPTED_FAMILIES))
            return f"an adapter of a {family} model (only {tried} are tested)"
        if (rank := saved.config.get("r", 0)) > RANKS[-1]:
            return f"an adapter of rank {rank}, above {RANKS[-1]}"
        if other := next((key for key in ("rank_pattern", "alpha_pattern") if saved.config.get(key)), None):
            return f"an adapter with {other}, which vLLM does not support"
        layers = (name.partition(".lora_")[0] for name in saved.shapes)
        odd = next((layer for layer in layers if layer.rpartition(".")[2] not in ADAPTED_LAYERS), None)
        return None if odd is None else f"an adapter on {odd}, which vLLM ignores"

    def for_scoring(self, model: FrozenModel) -> Engine:
        engine = _scoring_engine(model, torch.get_num_threads())
        engine.ready()
        return engine

    def in_own_process(self, model: FrozenModel, own: Own) -> list[Engine]:
        return [_scoring_engine(model, own.threads) for _ in range(own.replicas)]


def _scoring_engine(model: FrozenModel, threads: int) -> VllmEngine:
    """Create an engine without waiting for it. Raise if an adapter belongs to another base."""
    folder, held = TemporaryDirectory(prefix="practicum-vllm-"), model.held
    path, dtype = model.spec.path or folder.name, getattr(torch, model.spec.dtype)
    weights: WeightSource | None = None
    if held is not None:
        # A Ray actor has no student: its copy starts from the same weights.
        student = model.student or load_model(model.spec, model.seed, key=model.model_key)
        start = {name: tensor.detach().cpu().clone() for name, tensor in merged_weights(student)}
        path, dtype = _write_config(student, folder.name), student.dtype

        def current() -> tuple[Weights, int]:
            return (start if held.weights is None else held.weights).items(), held.version

        weights = current
    elif model.adapters:
        _prepare_base(model, folder.name)
    config = read_config(path)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    # One token more than the longest row, because vLLM always samples one.
    context = (model.context or min(longest or _UNDECLARED, _UNDECLARED)) + 1
    context = context if longest is None else min(context, longest)
    setup = _setup(
        model.key,
        model.settings,
        path,
        config,
        dtype,
        kv_tokens=max(context, model.batch_tokens),
        context=context,
        slots=_SCORED_SLOTS,
        threads=threads,
        loads=held is None,
        samples=False,
        max_logprobs=max(1, model.top_k),
        rank=max((saved.config["r"] for saved in model.adapters), default=None),
        adapters=max(1, len(model.adapters)),
        batch_tokens=model.batch_tokens,
    )
    return VllmEngine(setup, weights=weights, adapters=model.adapters, folder=folder, wait=False)


def _prepare_base(model: FrozenModel, folder: str) -> None:
    """Raise for adapters of another base. Write the base to the folder unless it is in one.

    Weights are loaded temporarily for the comparison, unless they are the student's.
    """
    is_made = model.spec.path is None
    base = model.student if model.student is not None and has_adapter(model.student) else None
    if base is None and (is_made or any(saved.base is not None for saved in model.adapters)):
        kind = {"device": "cpu"} if is_made else {"device": "cpu", "dtype": "bfloat16"}
        base = load_model(model.spec.model_copy(update=kind), model.seed, key=model.model_key)
    if base is not None:
        fingerprint = base_fingerprint(base)
        for saved in model.adapters:
            saved.check_base(fingerprint, model.about)
        if is_made:
            bare_base(base).save_pretrained(folder)


def _write_config(model: PreTrainedModel, folder: str) -> str:
    """Write the config of a model whose weights are sent. Return the folder."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # missing in a model that was not loaded from a folder
    config.save_pretrained(folder)
    return folder


def _setup(
    key: str,
    choice: EngineChoice,
    model: str,
    config: Any,
    dtype: torch.dtype,
    *,
    kv_tokens: int,
    **more: Any,
) -> VllmSetup:
    """Return settings with room for this many tokens, unless the recipe's section says otherwise."""
    parallel, text = choice.engine_devices, config.get_text_config()
    block_bytes = 0
    if heads := getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0):
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        block_bytes = 2 * _BLOCK * max(1, heads // parallel) * width * dtype.itemsize
    # The last block of each sequence is not full.
    blocks = -(-kv_tokens // _BLOCK) + more["slots"] + 1
    has_states = VllmKind().runs_recurrent(config)
    kv_bytes = text.num_hidden_layers * block_bytes * blocks
    if has_states:
        kv_bytes = _state_bytes(model, text.hidden_size, block_bytes, kv_tokens, more["slots"]) or kv_bytes
    settings = {"kv_bytes": kv_bytes, "tensor_parallel": parallel, "where": key, "has_states": has_states}
    dtype_name = str(dtype).removeprefix("torch.")
    return VllmSetup(model, dtype_name, options=choice.vllm, **settings, **more)


def _state_bytes(model: str, hidden: int, block_bytes: int, kv_tokens: int, slots: int) -> int:
    """Return the memory of keys, values and states that this many sequences need together.

    vLLM has one size of block for both: a layer's state fits into one, and tokens fill it. Layers are in
    groups of one size, and each sequence has own blocks in each group. Without states, the result is 0.
    """
    shell = skeleton(Model(path=model), torch.float32)
    attending, states = count_memory(shell, hidden)
    if not (recurrent := seam_of(shell).states):  # all layers of a small Granite 4 attend
        return 0
    needed = -(-states // recurrent)
    group = min(attending, recurrent) or recurrent
    page = -(-needed // block_bytes) * block_bytes if block_bytes else needed
    blocks = (slots + 1) * -(-recurrent // group)
    if attending:
        tokens = _BLOCK * page // block_bytes
        blocks += (-(-kv_tokens // tokens) + slots + 1) * -(-attending // group)
    return (blocks + 1) * group * page
