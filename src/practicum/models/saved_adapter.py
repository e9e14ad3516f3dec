"""Adapters in PEFT's format: what their files say, and whether they fit a base, before weights are loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from practicum.errors import RecipeError
from practicum.models.lora_product import ADAPTER
from practicum.models.model_files import must_read
from practicum.recipe.derived import ADAPTER_CONFIG, adapter_folder

if TYPE_CHECKING:  # an extra
    from peft import LoraConfig

WEIGHTS, ORIGIN = "adapter_model.safetensors", "practicum.json"
PREFIX = "base_model.model."
"""What PEFT's files put before the names of parameters."""
_WHOLE = "a LoRA adapter in PEFT's format that is whole"
_FOUND = f"a folder with {ADAPTER_CONFIG}, or the export, run folder or checkpoint of a run with model.lora"
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "layer_replication": None,
}
"""Settings of PEFT's by which an adapter is more than products of two matrices, and what they must be."""
_MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of PEFT's ways to start an adapter that change the base too."""
_MATTERS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
"""Settings that decide, with the weights, what an adapter does to its base."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a folder. `key` is the recipe's, for errors; names are those of parameters in a model."""

    key: str
    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    base: str | None
    """The fingerprint of the base that it was trained on; None if another program wrote it."""
    fingerprint: str
    """The same for adapters that do the same to a base."""

    @classmethod
    def read(cls, named: str, key: str) -> SavedAdapter:
        """By its config and the header of its weights; a RecipeError if it is missing, damaged or unknown."""
        folder = adapter_folder(named)
        if folder is None:
            advice = "train the recipe that makes it first, or check the path"
            if (Path(named).expanduser() / "config.json").is_file():
                advice = f"this is a whole model: set {key.rpartition('.')[0]}.model to it, without adapter"
            raise RecipeError(key, named, _FOUND, advice)
        origin = folder / ORIGIN
        with must_read(str(folder / ADAPTER_CONFIG), key, _WHOLE):
            config = json.loads((folder / ADAPTER_CONFIG).read_text())
        with must_read(str(origin), key, _WHOLE):
            base = json.loads(origin.read_text()).get("base") if origin.is_file() else None
        with must_read(str(folder / WEIGHTS), key, _WHOLE):
            with safe_open(folder / WEIGHTS, "pt") as file:
                shapes = {_own_name(n): tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
            fingerprint = _fingerprint(folder, config)
        saved = cls(key, folder, config, shapes, base, fingerprint)
        saved._check_kind()
        return saved

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return sum(map(prod, self.shapes.values()))

    def describe(self) -> str:
        """What it is, in a phrase."""
        return f"an adapter of rank {self.config.get('r')} ({self.parameters / 1e6:,.2f}M parameters)"

    def peft_config(self) -> LoraConfig:
        """Its config, for a model that only scores."""
        from peft import LoraConfig, PeftConfig

        config = PeftConfig.from_pretrained(str(self.folder))
        assert isinstance(config, LoraConfig)
        config.lora_dropout, config.init_lora_weights, config.inference_mode = 0.0, True, True
        return config

    def weights(self) -> dict[str, Tensor]:
        """Its weights, by their names in a model."""
        with must_read(str(self.folder), self.key, _WHOLE):
            return {_own_name(name): x for name, x in load_file(self.folder / WEIGHTS).items()}

    def check_fits(self, base: nn.Module, about: str) -> None:
        """A RecipeError if a layer that it adapts is missing in a base, or has other widths there.

        The base may be without weights. `about` says in errors which it is.
        """
        for place, what in self._misfits(base):
            found = f"{self.folder}, an adapter of another base: {place} {what}"
            raise RecipeError(self.key, found, f"an adapter of {about}", self._advice())

    def check_base(self, fingerprint: str, about: str) -> None:
        """A RecipeError if it was trained on weights of another fingerprint."""
        if self.base is None or self.base == fingerprint:
            return
        known = self.config.get("base_model_name_or_path")
        on = f"{self.base}, {known}" if known else self.base
        found = f"{self.folder}, trained on another base ({on})"
        raise RecipeError(self.key, found, f"an adapter of {about} ({fingerprint})", self._advice())

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]], about: str) -> None:
        """A RecipeError unless these are the parameters that PEFT's config makes of it on the base."""
        other = sorted(shapes.items() ^ self.shapes.items())
        if other:
            name = other[0][0]
            found = f"{self.folder}, whose config and weights are not of one adapter of {about}: see {name}"
            raise RecipeError(self.key, found, _WHOLE, "write or copy the folder again")

    def _misfits(self, base: nn.Module) -> Iterator[tuple[str, str]]:
        modules = dict(base.named_modules())
        for name, (_, width) in self.shapes.items():
            place, part, _ = name.partition(".lora_A.")
            up = self.shapes.get(name.replace(".lora_A.", ".lora_B."))
            module = modules.get(place.removesuffix(".base_layer"))
            if not part:
                continue
            if module is None or up is None:
                yield place, "is missing there" if module is None else "has no second matrix"
            elif isinstance(module, nn.Linear) and (width, up[0]) != (
                module.in_features,
                module.out_features,
            ):
                here = f"{module.in_features} × {module.out_features}"
                yield place, f"is {width} × {up[0]} for it and {here} there"

    def _advice(self) -> str:
        teacher = self.key.rpartition(".")[0]
        if not teacher:  # not of a recipe
            return "take the model that it was trained on, or train it again on this one"
        return (
            f"set {teacher}.model to the model that it was trained on, or train it again on this one; or set "
            f"{teacher}.model to the merged model, without adapter"
        )

    def _check_kind(self) -> None:
        found = _unusual(self.config)
        if found is None and not self.shapes:
            found = "no weights"
        elif found is None:
            odd = next((name for name in self.shapes if not _is_of_decoder(name)), None)
            found = None if odd is None else f"weights of {odd.partition('.lora_')[0]}"
        if found is not None:
            expected = "a LoRA adapter of the decoder's layers by two matrices for each weight"
            advice = "merge it into a model of its own, and set model to that in place of adapter"
            raise RecipeError(self.key, f"{self.folder} with {found}", expected, advice)


def _unusual(config: Mapping[str, Any]) -> str | None:
    """What makes an adapter more than products of two matrices; None if nothing does."""
    if config.get("peft_type") != "LORA":
        return f"peft_type {config.get('peft_type')}"
    other = [name for name, plain in _PLAIN.items() if config.get(name) not in (plain, None, [], False)]
    if other:
        return f"{other[0]} {config[other[0]]}"
    start = config.get("init_lora_weights")
    return f"init_lora_weights {start}" if str(start).lower().startswith(_MOVES_BASE) else None


def _is_of_decoder(name: str) -> bool:
    parts = name.split(".")
    return ("lora_A" in parts or "lora_B" in parts) and not {"lm_head", "embed_tokens", "wte"} & {*parts}


def _own_name(name: str) -> str:
    """The name of a parameter in a model that PEFT has put the adapter on, by its name in a file."""
    place, _, last = name.removeprefix(PREFIX).rpartition(".")
    return f"{place}.{ADAPTER}.{last}"


def _fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes())
    digest.update(json.dumps({name: config.get(name) for name in _MATTERS}, sort_keys=True).encode())
    return digest.hexdigest()[:16]
