"""Task arithmetic: a base plus the weighted changes that several models or adapters made to it.

    merged = base + sum_i w_i (model_i - base)

Adapters are merged as one adapter whose rank is the sum of theirs. Their matrices stand side by side: this is
exactly the weighted sum of their products. Ilharco et al. 2022, "Editing models with task arithmetic",
arXiv:2212.04089.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from practicum.compat import peft
from practicum.errors import PracticumError
from practicum.models.adapter_files import ORIGIN, PREFIX, WEIGHTS, SavedAdapter
from practicum.models.load_model import load_model
from practicum.models.lora import base_fingerprint
from practicum.models.model_files import read_tokenizer, save_description, write_model
from practicum.recipe.derived import ADAPTER_CONFIG, EXPORTED
from practicum.recipe.schema.recipe import Model

Weights = dict[str, Tensor]
Config = dict[str, Any]


@torch.no_grad()
def merge(base: str, named: Sequence[str], weights: Sequence[float], to: Path, *, adapters: bool) -> None:
    """Write the merge of models, or of adapters, of one base into a folder in HuggingFace format. Sums are in
    float64 and rounded once. A merge of adapters has the merged adapter beside the model."""
    model = load_model(Model(path=base, device="cpu"), 0)
    whole = {name: x.detach().double() for name, x in _tensors(model).items()}
    config, joined, saved = {}, Weights(), []
    if adapters:
        saved = [SavedAdapter.read(name, "merge") for name in named]
        fingerprint = base_fingerprint(model)
        for adapter in saved:
            adapter.check_base(fingerprint, base)
            adapter.check_fits(model, base)
        config, joined = join_adapters(saved, weights)
        for name, down in joined.items():
            if ".lora_A." in name:
                delta = joined[name.replace(".lora_A.", ".lora_B.")].double() @ down.double()
                place = f"{name.partition('.lora_A.')[0]}.weight"
                whole[place] += delta.t() if config["fan_in_fan_out"] else delta
    else:
        start = {name: x.clone() for name, x in whole.items()}
        for name, weight in zip(named, weights, strict=True):
            other = _tensors(load_model(Model(path=name, device="cpu"), 0))
            _check_same(base, {n: x.shape for n, x in start.items()}, name, other)
            for place, x in other.items():
                if x.is_floating_point():
                    whole[place] += weight * (x.double() - start[place])
    rounded = {name: whole[name].to(x.dtype) for name, x in _tensors(model).items()}
    with TemporaryDirectory() as description:
        save_description(Path(description), model, read_tokenizer(base), None)
        write_model(Path(description), rounded, to)
    if adapters:
        (to / EXPORTED).mkdir()
        (to / EXPORTED / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {PREFIX + name.replace(f".{peft.ADAPTER}.", "."): x for name, x in joined.items()}
        save_file(tensors, to / EXPORTED / WEIGHTS, metadata={"format": "pt"})
        (to / EXPORTED / ORIGIN).write_text(json.dumps({"base": saved[0].base}) + "\n")


def join_adapters(saved: Sequence[SavedAdapter], weights: Sequence[float]) -> tuple[Config, Weights]:
    """Return config and weights of the adapter that does what the weighted adapters do together.

    Its scaling is 1: theirs, and the weights, are in its second matrices. Where one of them adapts nothing,
    it adds zeros.
    """
    bases = {adapter.base for adapter in saved}
    if len(bases) > 1:
        listed = ", ".join(f"{adapter.folder} ({adapter.base})" for adapter in saved)
        raise PracticumError(f"these adapters have no common base: {listed}\n  → merge those of one base")
    for adapter in saved:
        odd = ("rank_pattern", "alpha_pattern", "target_parameters")
        if name := next((name for name in odd if adapter.config.get(name)), None):
            raise PracticumError(
                f"{adapter.folder} has {name}, and ranks of such adapters can't be joined\n"
                "  → merge their exported models: pass EXPORT folders and --base"
            )
    ranks = [int(adapter.config["r"]) for adapter in saved]
    held = [adapter.weights() for adapter in saved]
    shapes: dict[str, tuple[int, ...]] = {}
    for adapter in saved:
        shapes |= adapter.shapes
    joined: Weights = {}
    for name, shape in shapes.items():
        axis, parts = (0 if ".lora_A." in name else 1), []
        for adapter, own, rank, weight in zip(saved, held, ranks, weights, strict=True):
            size = (rank, shape[1]) if axis == 0 else (shape[0], rank)
            part = own[name].float() if name in own else torch.zeros(size)
            root = rank**0.5 if adapter.config.get("use_rslora") else rank
            parts.append(part if axis == 0 else part * (weight * adapter.config["lora_alpha"] / root))
        joined[name] = torch.cat(parts, dim=axis).contiguous()
    targets = sorted({target for adapter in saved for target in adapter.config["target_modules"]})
    changed = {"r": sum(ranks), "lora_alpha": sum(ranks), "use_rslora": False, "target_modules": targets}
    return {**saved[0].config, **changed}, joined


def _tensors(model: torch.nn.Module) -> Weights:
    saved = model.state_dict().keys()
    buffers = ((name, x) for name, x in model.named_buffers() if name in saved)
    return {name: x.detach() for name, x in (*model.named_parameters(), *buffers)}


def _check_same(base: str, shapes: dict[str, torch.Size], name: str, other: Weights) -> None:
    """Raise a PracticumError if a model can't come from the base."""
    differing = sorted(shapes.items() ^ {(n, x.shape) for n, x in other.items()})
    if differing:
        raise PracticumError(
            f"{name} is not a model of the base {base}: see {differing[0][0]}\n"
            "  → merge models that were trained from one base, and name it by --base"
        )
