"""Bytes that are known before anything is loaded; each is a lower bound."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from practicum.dataplane.fields import FIELDS
from practicum.dataplane.plan import Plan
from practicum.recipe.counts import count
from practicum.recipe.schema.recipe import Recipe

_ITEM = {"int64": 8, "float32": 4, "bool": 1, "object": 0}


def folder_bytes(path: str | None) -> int | None:
    """Size of the weights in a model's folder; None of what is not a folder, such as a hub name."""
    folder = Path(path or "").expanduser()
    if path is None or not folder.is_dir():
        return None
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    return sum(file.stat().st_size for file in weights)


def step_bytes(recipe: Recipe, plan: Plan) -> int:
    """Bytes of one step's rows in the store, with answers as long as a turn may be and without prompts."""
    widths = _widths(recipe)
    names = {name for stage in plan for name in stage.writes}
    per_token = sum(
        _ITEM[field.dtype] * prod(widths.get(axis, 0) for axis in field.trailing)
        for field in (FIELDS[name] for name in names)
        if field.extent in ("response", "sequence")
    )
    return count(recipe).sessions * recipe.rollout.max_new_tokens * per_token


def _widths(recipe: Recipe) -> dict[str, int]:
    """Lengths of the fields' other axes, as far as they are known."""
    widths = {"D": 3, "K": recipe.distill.top_k if recipe.distill is not None else 0}
    if (make := recipe.model.make) is not None:
        return widths | {"H": make.hidden, "L": make.layers, "E": make.experts_per_token}
    config = _config(recipe.model.path)
    names = {"H": "hidden_size", "L": "num_hidden_layers", "E": "num_experts_per_tok"}
    return widths | {axis: config.get(name) or 0 for axis, name in names.items()}


def _config(path: str | None) -> Mapping[str, Any]:
    try:
        config = json.loads((Path(path or "").expanduser() / "config.json").read_text())
    except (OSError, ValueError):  # a hub name, or a folder that is not there yet: other checks speak of it
        return {}
    return config.get("text_config") or config
