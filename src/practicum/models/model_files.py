"""Model folders and hub names: configs, tokenizers and image processors, read once per process and version of
the files, and models written to folders in HuggingFace format."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from practicum.errors import RecipeError
from practicum.models.hub import is_unreachable, not_found
from practicum.models.vision import is_vision

KEPT = 192
"""Size of the cache."""
_TOKENIZERS = "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken"
"""Names of tokenizers' files."""
_UNFIT = ArithmeticError, AttributeError, ImportError, LookupError, TypeError
_CONFIG, _GENERATION = "config.json", "generation_config.json"


@contextmanager
def must_read(source: str, key: str, expected: str) -> Iterator[None]:
    """Turn errors inside the context, which reads `source`, into a RecipeError about `key`."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, OSError) and is_unreachable(source):
            raise not_found(key, source, "model") from None
        raise RecipeError(key, source, expected, str(error).splitlines()[0]) from error


@contextmanager
def value_errors() -> Iterator[None]:
    """Turn transformers' errors about unfit configs and weights of other shapes into ValueErrors."""
    try:
        yield
    except (*_UNFIT, StrictDataclassError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"transformers makes no model of its config.json ({why})") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError("the shapes of its weights are not those of its config.json") from error


def require_model_folder(source: str, key: str = "model.path") -> None:
    """Require that a path that looks local is a folder with a config. A hub name is left to the hub."""
    folder = Path(source).expanduser()
    if os.path.isfile(folder / "adapter_config.json"):
        advice = "take the model that it was merged into, such as the folder of the run that trained it"
        if key.startswith("teachers."):
            advice += f"; or set {key.rpartition('.')[0]}.adapter to it"
        raise RecipeError(key, f"{source}, an adapter", "a whole model", advice)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1 or os.path.exists(source)
    if looks_local and not os.path.isfile(folder / _CONFIG):
        expected = "a folder with config.json and weights, a run folder or a checkpoint"
        raise RecipeError(key, source, expected, "train the recipe that makes it first, or check the path")


def require_tokenizer(source: str, key: str) -> None:
    """Require that a model's folder has a tokenizer. A hub name is left to the hub. `key` names the model."""
    folder = Path(source).expanduser()
    if os.path.isdir(folder) and not any(path for name in _TOKENIZERS for path in folder.glob(name)):
        other = f"{key.rpartition('.')[0]}.tokenizer"
        advice = f"set {other} to the folder or hub name of its tokenizer, or save the tokenizer there"
        raise RecipeError(key, f"{source}, which has no tokenizer", "a model with its tokenizer", advice)


def read_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name. Raise OSError or ValueError without one."""
    return _read(AutoTokenizer, source, _stamp(source))


def read_config(source: str) -> Any:
    return _read(AutoConfig, source, _stamp(source))


def read_image_processor(source: str) -> Any:
    return _read(AutoImageProcessor, source, _stamp(source))


def read_generation(source: str) -> Any:
    """Return the generation config of a folder or hub name, or the model's config if it has none."""
    try:
        return _read(GenerationConfig, source, _stamp(source))
    except OSError:
        return read_config(source).get_text_config()


def _stamp(source: str) -> tuple[int, ...]:
    """Return a version stamp of a folder, or an empty one for a hub name."""
    is_unreachable(source)
    folder = Path(source).expanduser()
    return tuple(file.stat().st_mtime_ns for file in sorted(folder.glob("*.json")))


@lru_cache(KEPT)
def _read(reader: Any, source: str, stamp: tuple[int, ...]) -> Any:
    with value_errors():
        return reader.from_pretrained(source)


def model_class(config: Any) -> Any:
    """Return the transformers class that makes models of this config. Raise ValueError for other models."""
    if is_vision(config):
        return AutoModelForImageTextToText
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        known = "causal language models of transformers work, and of vision models Qwen2-VL and Qwen2.5-VL"
        raise ValueError(f"{config.model_type} is another kind of model: {known}")
    return AutoModelForCausalLM


def save_description(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, processor: Any | None
) -> None:
    """Write all of a model's folder but the weights: configs, tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        # Without transformers' checks, which could keep a checkpoint from being written.
        model.generation_config.to_json_file(folder / _GENERATION)
    tokenizer.save_pretrained(folder)
    if processor is not None:
        processor.image_processor.save_pretrained(folder)


def write_model(description: Path, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder in HuggingFace format from what `save_description` wrote and the weights."""
    config = read_config(str(description))
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=config.dtype)
    if (description / _GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(description)
    model.save_pretrained(folder, state_dict=dict(weights))
    for file in description.iterdir():
        if file.name not in (_CONFIG, _GENERATION):
            shutil.copyfile(file, folder / file.name)
