"""Read and write adapters in PEFT's format, and record an adapter's base in checkpoints."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.compat import peft
from practicum.errors import PracticumError, RecipeError
from practicum.models.load_model import load_model
from practicum.models.lora import base_fingerprint, merged_weights
from practicum.models.model_files import must_read
from practicum.models.offloaded_weights import take_weights
from practicum.recipe.derived import ADAPTER_CONFIG, EXPORTED, adapter_folder
from practicum.recipe.schema.recipe import Model

if TYPE_CHECKING:  # an extra
    from peft import LoraConfig

WEIGHTS, ORIGIN, _BASE = "adapter_model.safetensors", "practicum.json", "base.json"
PREFIX = "base_model.model."
"""Prefix of parameter names in PEFT's files."""
_WHOLE = "a complete LoRA adapter in PEFT's format"
_PLAIN = ("bias", "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication")
"""PEFT settings of adapters that are more than products of two matrices."""
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of PEFT's initialisations that also change the base."""
_MATTERS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings that, with the weights, determine an adapter's effect."""


def write_adapter(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor], base: str) -> None:
    """Write an adapter of this model in PEFT's format. `base` is the fingerprint of its base."""
    config = copy.copy(peft.adapter_config(model))
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules or ())
    config.save_pretrained(str(folder))
    named = {f"{PREFIX}{name.replace(f'.{peft.ADAPTER}.', '.')}": x for name, x in weights.items()}
    tensors = {name: x.detach().cpu().contiguous() for name, x in named.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / ORIGIN).write_text(json.dumps({"base": base}) + "\n")


def save_base(student: Path, spec: Model, seed: int) -> None:
    """Note in a checkpoint's folder of the student which base its adapter is on."""
    path = spec.path
    if path is not None and Path(path).expanduser().is_dir():
        path = str(Path(path).expanduser().resolve())
    described = {"model": spec.model_dump(mode="json") | {"path": path}, "seed": seed}
    (student / _BASE).write_text(json.dumps(described, indent=1) + "\n")


def merge_checkpoint(student: Path, weights: dict[str, Tensor], export: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's plain model, from those in its folder of the student.

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
            f"{described['model']['path'] or 'the randomly initialised model'} is {base}\n"
            "  → restore the model that the run started from"
        )
    take_weights(model, weights.items())
    write_adapter(export / EXPORTED, model, weights, base)
    return dict(merged_weights(model))


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a folder. `key` is the recipe's, for errors. Names are those of parameters in a model."""

    key: str
    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    base: str | None
    """The fingerprint of the base that it was trained on, or None if another program wrote it."""
    fingerprint: str
    """The same for adapters that do the same to a base."""

    @classmethod
    def read(cls, named: str, key: str) -> SavedAdapter:
        """Read its config and the header of its weights. Raise RecipeError if missing, damaged or
        unsupported."""
        folder = adapter_folder(named)
        if folder is None:
            advice = "train its recipe first, or check the path"
            if (Path(named).expanduser() / "config.json").is_file():
                advice = f"this is a full model: set {key.rpartition('.')[0]}.model to it, and remove adapter"
            expected = f"a folder with {ADAPTER_CONFIG}, or an export, run folder or checkpoint of model.lora"
            raise RecipeError(key, named, expected, advice)
        with must_read(str(folder / ADAPTER_CONFIG), key, _WHOLE):
            config = json.loads((folder / ADAPTER_CONFIG).read_text())
            origin = folder / ORIGIN
            base = json.loads(origin.read_text()).get("base") if origin.is_file() else None
        with must_read(str(folder / WEIGHTS), key, _WHOLE):
            with safe_open(folder / WEIGHTS, "pt") as file:
                shapes = {_own_name(n): tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
            digest = hashlib.sha256((folder / WEIGHTS).read_bytes())
        digest.update(json.dumps({name: config.get(name) for name in _MATTERS}, sort_keys=True).encode())
        if (found := _unusual(config, shapes)) is not None:
            expected = "a LoRA adapter of the decoder's layers by two matrices for each weight"
            advice = "merge it into a model, and use model instead of adapter"
            raise RecipeError(key, f"{folder} with {found}", expected, advice)
        return cls(key, folder, config, shapes, base, digest.hexdigest()[:16])

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def describe(self) -> str:
        return f"an adapter of rank {self.config.get('r')} ({self.parameters / 1e6:,.2f}M parameters)"

    def peft_config(self) -> LoraConfig:
        """Return its config, for a model that only scores."""
        config = peft.read_config(self.key, self.folder)
        config.lora_dropout, config.init_lora_weights, config.inference_mode = 0.0, True, True
        return config

    def weights(self) -> dict[str, Tensor]:
        """Return its weights, by their names in a model."""
        with must_read(str(self.folder), self.key, _WHOLE):
            return {_own_name(name): x for name, x in load_file(self.folder / WEIGHTS).items()}

    def check_fits(self, base: nn.Module, about: str) -> None:
        """Raise a RecipeError if a layer that it adapts is missing in a base, or has other widths there. The
        base may be without weights. `about` says in errors which it is."""
        modules = dict(base.named_modules())
        for name, (_, width) in self.shapes.items():
            place, part, _ = name.partition(".lora_A.")
            up = self.shapes.get(name.replace(".lora_A.", ".lora_B."))
            module = modules.get(place.removesuffix(".base_layer"))
            found = None
            if part and (module is None or up is None):
                found = "is missing there" if module is None else "has no second matrix"
            elif part and up and isinstance(module, nn.Linear):
                here, there = (width, up[0]), (module.in_features, module.out_features)
                found = None if here == there else f"is {here} for it and {there} there"
            if found is not None:
                raise self._misfit(f"an adapter of another base: {place} {found}", about)

    def check_base(self, fingerprint: str, about: str) -> None:
        """Raise a RecipeError if it was trained on weights of another fingerprint."""
        if self.base not in (None, fingerprint):
            known = self.config.get("base_model_name_or_path")
            on = f"{self.base}, {known}" if known else self.base
            raise self._misfit(f"trained on another base ({on})", f"{about} ({fingerprint})")

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise a RecipeError unless these are the parameters that PEFT makes of its config on the base."""
        if other := sorted(shapes.items() ^ self.shapes.items()):
            found = f"{self.folder}, whose config and weights are not of one adapter: see {other[0][0]}"
            raise RecipeError(self.key, found, _WHOLE, "write or copy the folder again")

    def _misfit(self, what: str, about: str) -> RecipeError:
        advice = "use the model that it was trained on, or train it again on this one"
        if teacher := self.key.rpartition(".")[0]:
            advice = f"set {teacher}.model to the model that it was trained on or, without adapter, to the "
            advice += "merged model; or train it again on this one"
        return RecipeError(self.key, f"{self.folder}, {what}", f"an adapter of {about}", advice)


def _unusual(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> str | None:
    """Return why an adapter is more than products of two matrices in the decoder's layers, or None."""
    if config.get("peft_type") != "LORA":
        return f"peft_type {config.get('peft_type')}"
    if other := next((name for name in _PLAIN if config.get(name) not in ("none", None, [], False)), None):
        return f"{other} {config[other]}"
    start = config.get("init_lora_weights")
    if str(start).lower().startswith(_MOVES_BASE):
        return f"init_lora_weights {start}"
    for name in shapes:
        parts = {*name.split(".")}
        if not {"lora_A", "lora_B"} & parts or {"lm_head", "embed_tokens", "wte"} & parts:
            return f"weights of {name.partition('.lora_')[0]}"
    return None if shapes else "no weights"


def _own_name(name: str) -> str:
    """Return the name of a parameter in a model that PEFT has put the adapter on, by its name in a file."""
    place, _, last = name.removeprefix(PREFIX).rpartition(".")
    return f"{place}.{peft.ADAPTER}.{last}"
