"""Adapters on disk: PEFT's format for others, and what a checkpoint says of its adapter's base."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from practicum.errors import PracticumError
from practicum.models.load_model import load_model
from practicum.models.lora import adapter_config, base_fingerprint, merged_weights
from practicum.models.lora_product import ADAPTER
from practicum.models.offloaded_weights import take_weights
from practicum.models.saved_adapter import ORIGIN, PREFIX, WEIGHTS
from practicum.recipe.derived import EXPORTED
from practicum.recipe.schema.recipe import Model

_BASE = "base.json"


def write_adapter(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor], base: str) -> None:
    """Write an adapter of this model in PEFT's format; `base` is the fingerprint of its base."""
    config = copy.copy(adapter_config(model))
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules or ())
    config.save_pretrained(str(folder))
    named = {f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": x for name, x in weights.items()}
    tensors = {name: x.detach().cpu().contiguous() for name, x in named.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / ORIGIN).write_text(json.dumps({"base": base}) + "\n")


def save_base(student: Path, spec: Model, seed: int) -> None:
    """Note in a checkpoint's folder of the student what its adapter is on."""
    local = spec.path is not None and Path(spec.path).expanduser().is_dir()
    path = str(Path(spec.path).expanduser().resolve()) if local and spec.path is not None else spec.path
    described = {"model": spec.model_dump(mode="json") | {"path": path}, "seed": seed}
    (student / _BASE).write_text(json.dumps(described, indent=1) + "\n")


def merge_checkpoint(student: Path, weights: dict[str, Tensor], export: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's plain model, from those in its folder of the student.

    They are all of it, or an adapter: that is written into the export too, and merged into its base, which is
    loaded for that and must be the one that it was trained on.
    """
    if not (student / _BASE).is_file():
        return weights
    described = json.loads((student / _BASE).read_text())
    model = load_model(Model.model_validate(described["model"] | {"device": "cpu"}), described["seed"])
    base, saved = base_fingerprint(model), json.loads((student / "learner.json").read_text())["base"]
    if base != saved:
        raise PracticumError(
            f"the adapter in {student} was trained on another base: its fingerprint is {saved}, and that of "
            f"{described['model']['path'] or 'the made model'} is {base}\n"
            "  → put the model that the run began with back in its place"
        )
    take_weights(model, weights.items())
    write_adapter(export / EXPORTED, model, weights, base)
    return dict(merged_weights(model))
