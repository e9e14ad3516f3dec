"""Tiny teachers on disk, and recipes in which a tiny student learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from practicum.models.adapter_files import write_adapter
from practicum.models.load_model import load_model, make_model
from practicum.models.lora import base_fingerprint
from practicum.models.offloaded_weights import named_tensors
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import Lora, MakeModel, Model

MAKE: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "context": 128}
TASKS: dict[str, Any] = {
    "copy": {"kind": "copy", "options": {"length": [1, 2]}},
    "compare": {"kind": "compare"},
}


def save_teacher(folder: Path, *, seed: int, scale: float = 5.0, **make: Any) -> str:
    """A model in HuggingFace format with its tokenizer; weights are large enough for it to have opinions."""
    tokenizer = make_tokenizer()
    model = make_model(MakeModel.model_validate(MAKE | make), tokenizer, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_adapter(folder: Path, base: str, *, seed: int, rank: int = 2) -> PreTrainedModel:
    """An adapter on this base that has learnt something, in PEFT's format; gives the model with it."""
    model = load_model(Model(path=base, lora=Lora(rank=rank, alpha=4.0)), seed)
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=g)
    folder.mkdir(parents=True)
    write_adapter(folder, model, named_tensors(model), base_fingerprint(model))
    return model


def teachers_recipe(**sections: Any) -> dict[str, Any]:
    """A recipe of a tiny student; teachers are to be added."""
    return {
        "name": "school",
        "seed": 3,
        "model": {"random_init": dict(MAKE)},
        "tasks": {name: dict(task) for name, task in TASKS.items()},
        "rollout": {"samples": 2, "max_new_tokens": 6, "max_num_seqs": 16},
        "train": {"steps": 2, "prompts": 4, "lr": 1e-3},
        "reward": {"weight": 0.0},
        "eval": {"rows": 2},
        "runtime": {"threads": 1},
    } | sections
