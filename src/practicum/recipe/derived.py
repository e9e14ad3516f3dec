"""Derive facts from a recipe's settings: shared bases of teachers, traits and sizes of models."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from practicum.recipe.schema.teacher_sections import Teacher

if TYPE_CHECKING:  # these sections ask this module when their keys are read
    from practicum.recipe.schema.recipe import MakeModel, Model


def products(teachers: Mapping[str, Teacher]) -> dict[str, dict[str, float]]:
    """Return the exponents of each teacher whose target is a product."""
    used = {name: {n: e for n, e in (t.target or {}).items() if e} for name, t in teachers.items()}
    return {name: target for name, target in used.items() if target and target != {name: 1.0}}


def mixtures(teachers: Mapping[str, Teacher]) -> dict[str, dict[str, float]]:
    """Return the weights of each teacher's mixture, of those that do not teach themselves alone."""
    used = {name: {n: w for n, w in (t.mixture or {}).items() if w} for name, t in teachers.items()}
    return {name: mixture for name, mixture in used.items() if mixture and mixture != {name: 1.0}}


def parts_of(teachers: Mapping[str, Teacher]) -> dict[str, dict[str, float]]:
    """Return the teachers that together make what a teacher teaches, of products and mixtures."""
    return products(teachers) | mixtures(teachers)


def base_groups(teachers: Mapping[str, Teacher]) -> list[list[str]]:
    """Return groups of teachers that share a base: adapters, and full models that are the base of adapters. A
    group shares a process: this one, or an engine's if all settings are equal."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, teacher in teachers.items():
        is_apart, shares = teacher.placement_name == "own", teacher.engine_traits.shares_process
        if teacher.url is None and teacher.student is None and (shares or not is_apart):
            base = (teacher.model, teacher.dtype, teacher.device) if teacher.model is not None else ()
            own = teacher.own_options if is_apart else None
            settings = (repr(own), repr(teacher.engine_arguments)) if shares else ()
            groups.setdefault((teacher.engine, *base, *settings), []).append(name)
    return [names for names in groups.values() if any(teachers[name].adapter for name in names)]


ADAPTER_CONFIG, EXPORTED = "adapter_config.json", "adapter"
"""A file that every adapter in PEFT's format has, and the export's folder for the adapter. Next to
config.json, transformers would load both."""


def adapter_folder(named: str) -> Path | None:
    """Return the adapter folder of a path: itself, or a folder in an export. None if neither exists."""
    folder = Path(named).expanduser()
    return next((f for f in (folder, folder / EXPORTED) if os.path.isfile(f / ADAPTER_CONFIG)), None)


VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Model types with supported image input. Other vision models are used as text models."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config names of the number of experts."""


@dataclass(frozen=True, slots=True)
class Traits:
    """`moe`: experts are recorded per token. `vision`: rows may have images and several position axes."""

    moe: bool = False
    vision: bool = False


def traits_of(config: Mapping[str, Any]) -> Traits:
    """Return the traits of a model from its config.json."""
    text = config.get("text_config") or config
    experts = (text.get(name) or 0 for name in EXPERT_KEYS)
    return Traits(
        moe=any(count > 1 for count in experts if isinstance(count, int)),
        vision=config.get("model_type") in VISION_FAMILIES,
    )


def model_traits(model: Model) -> Traits:
    """Return the traits of the student, from its family or its folder's config. Unknown models have none."""
    if model.random_init is not None:
        family = model.random_init.family
        return Traits(moe=family == "qwen3_moe", vision=family in VISION_FAMILIES)
    return traits_of(folder_config(model.path))


def folder_config(path: str | None) -> dict[str, Any]:
    """Return the config of a model's folder, or {} for a hub name or a missing folder."""
    try:
        config = json.loads((Path(path or "").expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def saved_parameters(folder: Path) -> int | None:
    """Count the parameters in a folder's safetensors files by their headers, or return None."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None


def made_sizes(make: MakeModel) -> dict[str, Any]:
    """Return a random model's sizes under its family's config names. Of vision models, the text part's."""
    if make.family == "gpt2":
        heads = {"n_embd": make.hidden, "n_layer": make.layers, "n_head": make.heads}
        return heads | {"n_positions": make.context}
    sizes: dict[str, Any] = {
        "hidden_size": make.hidden,
        "intermediate_size": 3 * make.hidden,
        "num_hidden_layers": make.layers,
        "num_attention_heads": make.heads,
        "num_key_value_heads": make.kv_heads,
        "max_position_embeddings": make.context,
    }
    if make.family != "qwen2_5_vl":
        sizes["head_dim"] = make.head_dim
    if make.family == "qwen3_5":
        sizes |= {"linear_num_value_heads": make.heads, "linear_num_key_heads": make.kv_heads}
        sizes |= {"linear_value_head_dim": make.head_dim, "linear_key_head_dim": make.head_dim}
        kinds = "linear_attention", "full_attention"
        sizes["layer_types"] = [kinds[i % 2] for i in range(make.layers)]
    if make.family == "qwen3_moe":
        sizes |= {"num_experts": make.experts, "num_experts_per_tok": 2}
        # Two experts cost as much per token as a dense layer of this width.
        sizes["moe_intermediate_size"] = max(1, 3 * make.hidden // 2)
    return sizes
