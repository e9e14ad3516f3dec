"""A model as a folder in HuggingFace format, written from its weights and a description without any."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from practicum.models.load_model import model_class
from practicum.models.model_files import read_config
from practicum.models.processor import Processor, save_processor

_CONFIGS = ("config.json", "generation_config.json")


def save_description(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, processor: Processor | None
) -> None:
    """Write all of a model's folder but the weights: configs, tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        # Without transformers' checks, which could keep a checkpoint from being written.
        model.generation_config.to_json_file(folder / _CONFIGS[1])
    tokenizer.save_pretrained(folder)
    if processor is not None:
        save_processor(processor, folder)


def write_model(description: Path, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder in HuggingFace format from what `save_description` wrote and the weights."""
    config = read_config(str(description))
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=config.dtype)
    if (description / _CONFIGS[1]).is_file():
        model.generation_config = GenerationConfig.from_pretrained(description)
    model.save_pretrained(folder, state_dict=dict(weights))
    for file in description.iterdir():
        if file.name not in _CONFIGS:
            shutil.copyfile(file, folder / file.name)
