"""Tiny teachers on disk, and recipes in which a tiny student learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from practicum.models.load_model import make_model
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import MakeModel

MAKE: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "context": 128,
}
TASKS: dict[str, Any] = {
    "copy": {"kind": "copy", "options": {"length": [1, 2]}},
    "compare": {"kind": "compare"},
}


def save_teacher(folder: Path, *, seed: int, hidden: int = 32, scale: float = 5.0) -> str:
    """A model in HuggingFace format with its tokenizer; weights are large enough for it to have opinions."""
    tokenizer = make_tokenizer()
    model = make_model(MakeModel.model_validate(MAKE | {"hidden": hidden}), tokenizer, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def teachers_recipe(**sections: Any) -> dict[str, Any]:
    """A recipe of a tiny student; teachers are to be added."""
    return {
        "name": "school",
        "seed": 3,
        "model": {"make": dict(MAKE)},
        "tasks": {name: dict(task) for name, task in TASKS.items()},
        "rollout": {"samples": 2, "max_new_tokens": 6, "slots": 16},
        "train": {"steps": 2, "prompts": 4, "lr": 1e-3},
        "reward": {"weight": 0.0},
        "eval": {"rows": 2},
        "runtime": {"threads": 1},
    } | sections
