"""Models from a folder, a hub or nowhere, ready for packed attention."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from practicum.devices import keep_freed_memory, pick_device
from practicum.errors import RecipeError
from practicum.models import experts
from practicum.models.attention import prepare_attention
from practicum.models.linears import fuse_linears
from practicum.models.lora import add_adapter
from practicum.models.model_files import must_read, read_config, read_tokenizer
from practicum.models.norms import fuse_norms
from practicum.models.processor import make_vision_tokenizer
from practicum.models.tiny_models import made_config
from practicum.models.tokenizer import make_tokenizer
from practicum.models.vision import is_vision
from practicum.recipe.schema.recipe import MakeModel, Model

EXPECTED = "a causal language model in HuggingFace format"

disable_progress_bar()  # loading and saving would draw into our own display


def make_model(spec: MakeModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A tiny model with random weights, a function of the seed."""
    config = made_config(spec, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).from_config(config, dtype=torch.float32)


def model_class(config: Any) -> Any:
    """The transformers class that makes models of this config."""
    return AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM


def load_tokenizer(spec: Model) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer, with a padding token."""
    # Texts are short: its threads gain nothing, and every process that is forked after them prints a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if spec.make is not None and spec.tokenizer is None:
        return make_vision_tokenizer() if spec.make.family == "qwen2_5_vl" else make_tokenizer()
    source = spec.tokenizer or spec.path
    assert source is not None
    if spec.tokenizer is None:
        require_model_folder(source)
    key = "model.tokenizer" if spec.tokenizer else "model.path"
    with must_read(source, key, "a tokenizer in HuggingFace format"):
        tokenizer = read_tokenizer(source)
    if tokenizer.eos_token_id is None:
        raise RecipeError(
            "model.tokenizer",
            source,
            "a tokenizer with an end-of-sequence token",
            "set eos_token in its config",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(spec: Model, path: Path) -> None:
    """The tokenizer as one file that the tokenizers package reads; nothing for one written in Python."""
    core = getattr(load_tokenizer(spec), "backend_tokenizer", None)
    if core is not None:
        core.save(str(path))


def load_model(
    spec: Model, seed: int, *, path: str | None = None, key: str = "model.path"
) -> PreTrainedModel:
    """The student (or `path` in its place), on its device, without dropout; `key` is for errors.

    The student has the recipe's adapter, if it says one; a model in its place never has.
    """
    source = path or spec.path
    dtype = getattr(torch, spec.dtype)
    if source is None:
        assert spec.make is not None
        model = make_model(spec.make, load_tokenizer(spec), seed).to(dtype)
    else:
        require_model_folder(source, key)
        with must_read(source, key, EXPECTED):
            model = model_class(read_config(source)).from_pretrained(source, dtype=dtype)
    if spec.lora is not None and path is None:
        add_adapter(model, spec.lora, seed, source)
    return ready(model, pick_device(spec.device, f"{key.rpartition('.')[0] or 'model'}.device"))


def skeleton(spec: Model, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The recipe's model without weights and without an adapter, by its config (`dtype` may be another)."""
    if spec.path is None:
        assert spec.make is not None
        config = made_config(spec.make, load_tokenizer(spec))
    else:
        config = copy.deepcopy(read_config(spec.path))
    with torch.device("meta"):
        return model_class(config).from_config(config, **({} if dtype is None else {"dtype": dtype}))


def ready(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Without dropout (sampling and training must see one distribution), with packed attention, and with
    norms, products and experts that give learner and engines the same bits."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    prepare_attention(model)
    fuse_norms(model)
    fuse_linears(model)
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped matrix product knows no doubles
    elif device.type == "cpu":
        model.set_experts_implementation(experts.IMPLEMENTATION)
    if device.type == "cpu":
        keep_freed_memory()
    model._apply(lambda x: x if x.is_meta else x.to(device))
    return model.eval()


def require_model_folder(source: str, key: str = "model.path") -> None:
    """A path that looks local must be a folder with a config; a hub name is left to the hub."""
    if (Path(source).expanduser() / "adapter_config.json").is_file():
        expected = "a whole model"
        advice = "take the model that it was merged into, such as the folder of the run that trained it"
        if key.startswith("teachers."):
            advice += f"; or set {key.rpartition('.')[0]}.adapter to it"
        raise RecipeError(key, f"{source}, an adapter", expected, advice)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).exists()
    if looks_local and not (Path(source).expanduser() / "config.json").is_file():
        raise RecipeError(
            key,
            source,
            "a folder with config.json and weights, a run folder or a checkpoint",
            "train the recipe that makes it first, or check the path",
        )


def model_facts(spec: Model, tokens: int) -> tuple[int | None, int | None]:
    """Longest sequence and width of the output, as far as the config says; no weights are loaded."""
    if spec.make is not None:
        return spec.make.context, tokens
    assert spec.path is not None
    require_model_folder(spec.path)
    with must_read(spec.path, "model.path", EXPECTED):
        config = read_config(spec.path)
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence the model was made for, if its config says."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def stop_ids(generation: Any, tokenizer: PreTrainedTokenizerBase, more: Sequence[str] = ()) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's EOS, the generation config's, and the recipe's."""
    declared = getattr(generation, "eos_token_id", None)
    ids: list[Any] = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    for text in more:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1 or found[0] == tokenizer.unk_token_id:
            raise RecipeError("rollout.stop", f"{text!r}, {len(found)} tokens", "strings of one token each")
        ids.append(found[0])
    return frozenset(int(i) for i in ids if i is not None)
