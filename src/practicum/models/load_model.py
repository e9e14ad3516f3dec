"""Load models from a folder or hub, or initialise them randomly, and prepare them for packed attention."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from practicum.compat.transformers import IMPLEMENTATION, disable_progress_bar, use_attention
from practicum.cpu import switch
from practicum.cpu.linears import fuse_linears
from practicum.cpu.norms import fuse_norms
from practicum.devices import keep_freed_memory, pick_device
from practicum.errors import EngineError, RecipeError
from practicum.models import attention, experts  # noqa: F401  (attention registers its function)
from practicum.models.lora import add_adapter
from practicum.models.model_files import (
    model_class,
    must_read,
    read_config,
    read_tokenizer,
    require_model_folder,
    require_tokenizer,
    value_errors,
)
from practicum.models.processor import make_vision_tokenizer
from practicum.models.state_layers import KNOWN_LAYERS, add_seam, unknown_layers
from practicum.models.tiny_models import made_config
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import MakeModel, Model

_EXPECTED = "a causal language model in HuggingFace format"

disable_progress_bar()  # loading and saving would draw into our own display


def make_model(spec: MakeModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Return a tiny model with random weights, a function of the seed."""
    config = made_config(spec, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).from_config(config, dtype=torch.float32)


def load_tokenizer(spec: Model) -> PreTrainedTokenizerBase:
    """Return the recipe's tokenizer, with a padding token."""
    # Texts are short: its threads gain nothing, and every process that is forked after them prints a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if spec.random_init is not None and spec.tokenizer is None:
        return make_vision_tokenizer() if spec.random_init.family == "qwen2_5_vl" else make_tokenizer()
    source = spec.tokenizer or spec.path
    assert source is not None
    if spec.tokenizer is None:
        require_model_folder(source)
        require_tokenizer(source, "model.path")
    key = "model.tokenizer" if spec.tokenizer else "model.path"
    with must_read(source, key, "a tokenizer in HuggingFace format"):
        tokenizer = read_tokenizer(source)
    if tokenizer.eos_token_id is None:
        expected = "a tokenizer with an end-of-sequence token"
        raise RecipeError("model.tokenizer", source, expected, "set eos_token in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(spec: Model, path: Path) -> None:
    """Write the tokenizer as one file that the tokenizers package reads, unless it is written in Python."""
    core = getattr(load_tokenizer(spec), "backend_tokenizer", None)
    if core is not None:
        core.save(str(path))


def load_model(
    spec: Model, seed: int, *, path: str | None = None, key: str = "model.path", rank: int | None = None
) -> PreTrainedModel:
    """Return the student, or the model at `path`, on its device and without dropout.

    The student has the recipe's adapter, if any. A model at `path` has none. If several ranks share the
    model, only the first has weights, on the CPU. `key` is the recipe key for errors.
    """
    source = path or spec.path
    dtype = getattr(torch, spec.dtype)
    if rank:
        model = skeleton(spec if path is None else spec.model_copy(update={"path": path}), dtype)
    elif source is None:
        assert spec.random_init is not None
        model = make_model(spec.random_init, load_tokenizer(spec), seed).to(dtype)
    else:
        require_model_folder(source, key)
        with must_read(source, key, _EXPECTED), value_errors():
            makes = model_class(read_config(source))
            model, found = makes.from_pretrained(source, dtype=dtype, output_loading_info=True)
            if lacking := sorted(found["missing_keys"]):  # they would be random
                raise ValueError(f"its files lack {len(lacking)} weights, such as {lacking[0]}")
    if spec.lora is not None and path is None:
        add_adapter(model, spec.lora, seed, source)
    if rank:
        model.to("meta")  # pyright: ignore[reportArgumentType]
    device = pick_device(spec.device, f"{key.rpartition('.')[0] or 'model'}.device")
    return ready(model, device, move=rank is None)


def skeleton(spec: Model, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the recipe's model from its config (or in `dtype`), without weights and adapter."""
    if spec.path is None:
        assert spec.random_init is not None
        config = made_config(spec.random_init, load_tokenizer(spec))
    else:
        config = copy.deepcopy(read_config(spec.path))
    with torch.device("meta"), value_errors():
        return model_class(config).from_config(config, **({} if dtype is None else {"dtype": dtype}))


def require_known_layers(source: str, key: str) -> None:
    """Raise a RecipeError if learner and torch engine can't run the layers of a model. Loads no weights."""
    require_model_folder(source, key)
    with must_read(source, key, _EXPECTED):
        model = skeleton(Model(path=source))
    if unknown := unknown_layers(model):
        raise RecipeError(key, f"{source}, a {type(model).__name__} with {unknown}", KNOWN_LAYERS)


def replays_experts(spec: Model) -> bool:
    """Return True if the routers of the recipe's model can be recorded and replayed. Loads no weights."""
    return experts.routes_of(skeleton(spec)) is not None


def ready(model: PreTrainedModel, device: torch.device, *, move: bool = True) -> PreTrainedModel:
    """Prepare a model: no dropout (sampling and training must see one distribution), packed attention, and
    the CPU kernels that compute the same bits in learner and engines."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if unknown := unknown_layers(model):
        raise EngineError(f"{type(model).__name__} has {unknown}; those that work are {KNOWN_LAYERS}")
    use_attention(model)
    add_seam(model)
    fuse_norms(model)
    fuse_linears(model)
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped matrix product knows no doubles
    elif device.type == "cpu" and switch.ENABLED:
        model.set_experts_implementation(IMPLEMENTATION)
    if device.type == "cpu":
        keep_freed_memory()
    if move:
        model.to(device)  # pyright: ignore[reportArgumentType]
    return model.eval()


def model_facts(spec: Model, tokens: int) -> tuple[int | None, int | None]:
    """Return maximum sequence length and output width from the config, without loading weights."""
    if spec.random_init is not None:
        return spec.random_init.context, tokens
    assert spec.path is not None
    require_model_folder(spec.path)
    with must_read(spec.path, "model.path", _EXPECTED):
        text = read_config(spec.path).get_text_config()
    return getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)


def context_length(model: PreTrainedModel) -> int | None:
    """Return the model's maximum sequence length, or None if its config has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def stop_ids(
    generation: GenerationConfig | PreTrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    more: Sequence[str] = (),
) -> frozenset[int]:
    """Return the stop tokens of tokenizer, generation config and recipe."""
    declared = getattr(generation, "eos_token_id", None)
    ids: list[Any] = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    for text in more:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            raise RecipeError("rollout.stop", f"{text!r}, {len(found)} tokens", "strings of one token each")
        ids.append(found[0])
    return frozenset(int(i) for i in ids if i is not None)
