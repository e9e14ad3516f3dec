"""What a model needs of its rows besides tokens, as far as the recipe or the model's config says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.recipe.schema.recipe import Model

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Models whose pictures practicum knows how to show; others of their kind are text models here."""


@dataclass(frozen=True, slots=True)
class Traits:
    """`moe`: tokens take experts, which are recorded. `vision`: rows may have pictures and positions of
    several axes."""

    moe: bool = False
    vision: bool = False


def traits_of(config: Mapping[str, Any]) -> Traits:
    """The traits of a model by its config.json."""
    text = config.get("text_config") or config
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    return Traits(moe=experts > 1, vision=config.get("model_type") in VISION_FAMILIES)


def model_traits(model: Model) -> Traits:
    """The traits of the student: made ones by their family, a folder's by its config; plain if unknown."""
    if model.make is not None:
        family = model.make.family
        return Traits(moe=family == "qwen3_moe", vision=family in VISION_FAMILIES)
    path = Path(model.path or "").expanduser() / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):  # a hub name, or a folder that does not exist yet: checks speak of it
        return Traits()
    return traits_of(config) if isinstance(config, dict) else Traits()
