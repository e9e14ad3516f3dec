"""LoRA with PEFT: low-rank trained matrices on the frozen linear layers of a model, its base.

`add_adapter` puts PEFT's layers around the model's own, so the model keeps its class, its attention and its
norms. `load_model.ready` is called after it. The base is never written to: with the adapter off it computes
what it did before, bit for bit, and merged weights are made anew each time, from it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from practicum.compat import peft
from practicum.compat.peft import Factors, adapted_layers
from practicum.cpu.adapted_linears import fuse_adapter
from practicum.cpu.adapter_rows import AdapterRows, RowsLayer
from practicum.errors import RecipeError
from practicum.models.state_layers import read_weights_of

if TYPE_CHECKING:  # whoever only asks for names does not need it
    from transformers import PreTrainedModel

    from practicum.models.adapter_files import SavedAdapter
    from practicum.recipe.schema.recipe import Lora

M = TypeVar("M", bound=nn.Module)
Gather = Callable[[Tensor], Tensor]
"""Returns the whole of a sharded weight."""

_WRAPPED = ".base_layer"
"""What PEFT puts into the names of weights that it wraps."""
_GATES = ("gate", "router", "shared_expert_gate")
_SAMPLE = 64
"""Numbers of each tensor that go into a fingerprint with their places."""


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int, source: str | None = None) -> None:
    """Put a new adapter on a model on the CPU and freeze all other weights. It starts without effect (B = 0).
    A is a function of the seed. `source` is where the base came from."""
    modules, parameters = find_targets(model, lora.targets)
    _require_useful_rank(model, lora.rank, [*(f"{name}.weight" for name in modules), *parameters])
    config = peft.lora_config(
        "model.lora",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_endings(modules, _named_linears(model), 1),
        target_parameters=_endings(parameters, _named_stacks(model), 2) or None,
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in modules),
        base_model_name_or_path=source,
        task_type="CAUSAL_LM",
    )
    peft.inject(model, config, seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):  # updates would be lost in the rounding of half precision
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    fuse_adapter(model)


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def has_adapter(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def trained_names(model: nn.Module) -> frozenset[str] | None:
    """Return the parameters of a model with an adapter that training changes, or None for all of
    another's."""
    if not has_adapter(model):
        return None
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def describe_adapter(model: nn.Module) -> str:
    """Describe the size of the adapter."""
    trained = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
    share = trained / sum(p.numel() for p in model.parameters())
    layers = len(list(adapted_layers(model)))
    return f"adapter: {trained / 1e6:,.2f}M trained parameters ({share:.1%}) on {layers} weights"


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapter inside the context. The model must not be used concurrently."""
    peft.turn_adapter(model, off=True)
    try:
        yield
    finally:
        peft.turn_adapter(model, off=False)


def copy_on_base(model: M) -> M:
    """Return a deep copy of a model. If it has an adapter, copy only the adapter, and share the base."""
    frozen = [p for p in model.parameters() if not p.requires_grad] if has_adapter(model) else []
    return copy.deepcopy(model, {id(parameter): parameter for parameter in frozen})


def bare_base(model: PreTrainedModel) -> PreTrainedModel:
    """Return the base of a model with an adapter as a separate model, by the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    bare = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if has_adapter(bare):
        peft.take_out(bare)
    return bare.eval()


@torch.no_grad()
def merged_weights(model: nn.Module, gather: Gather = lambda tensor: tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and saved buffers of a plain model that computes what base and adapter do.

    Names are the plain model's, tied weights come once. Sums are in float32 (float64, if the model is), from
    the base as it was loaded, which stays as it is.
    """
    layers = {id(peft.adapted_weight(layer)): layer for layer in adapted_layers(model)}
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, tensor in (*model.named_parameters(), *buffers):
        if is_adapter(name):
            continue
        weight = gather(tensor.detach())
        if (layer := layers.get(id(tensor))) is not None:
            wide = torch.promote_types(weight.dtype, torch.float32)
            *both, scaling = Factors.of(layer)
            delta = peft.product(layer, *(gather(part.detach()).to(wide) for part in both)) * scaling
            weight = (weight.to(wide) + delta).to(weight.dtype)
        yield name.replace(_WRAPPED, ""), weight


@torch.no_grad()
def base_fingerprint(model: nn.Module, gather: Gather = lambda tensor: tensor) -> str:
    """Return a hash of all weights but the adapter's, the same whatever dtype they are held in."""
    digest = hashlib.sha256()
    weights = (
        (name.replace(_WRAPPED, ""), p) for name, p in model.named_parameters() if not is_adapter(name)
    )
    for name, parameter in sorted(weights):
        bits = gather(parameter.detach()).to(torch.bfloat16).flatten().view(torch.int16)
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].tolist()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(parameter.shape)} {total} {sample}\n".encode())
    return digest.hexdigest()[:16]


def put_adapters(base: PreTrainedModel, adapters: Mapping[str, SavedAdapter], about: str) -> None:
    """Put adapters on a model without one, under these names, and freeze the model. Raise RecipeError before
    loading if an adapter has another base. `about` describes the base in the message."""
    fingerprint = base_fingerprint(base)
    for saved in adapters.values():
        saved.check_base(fingerprint, about)
        saved.check_fits(base, about)
    base.requires_grad_(False)
    rows = AdapterRows([*adapters])
    by_layer: dict[str, dict[str, nn.Module]] = {}
    for name, saved in adapters.items():
        for place, layer in _peft_layers(base, saved).items():
            by_layer.setdefault(place, {})[name] = layer
    for place, layers in by_layer.items():
        base.set_submodule(place, RowsLayer(base.get_submodule(place), layers, rows))
    base.eval()


def _peft_layers(base: PreTrainedModel, saved: SavedAdapter) -> dict[str, nn.Module]:
    """Return PEFT's layers with an adapter's weights, by the names of those that they adapt."""
    peft.inject(base, saved.peft_config())
    own = {name: p for name, p in base.named_parameters() if is_adapter(name)}
    try:
        saved.check_parameters({name: tuple(p.shape) for name, p in own.items()})
        for name, weight in saved.weights().items():
            wide = torch.promote_types(own[name].dtype, torch.float32)
            own[name].data = weight.to(own[name].device, wide)
            own[name].requires_grad_(False)
    finally:
        layers = peft.take_out(base)
    return layers


def rows_of(model: nn.Module) -> AdapterRows | None:
    """Return the adapters of a model that `put_adapters` made, or None of another one."""
    return next((module.rows for module in model.modules() if isinstance(module, RowsLayer)), None)


def find_targets(model: PreTrainedModel, targets: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the linear layers to adapt, and the stacked weights of experts, by their full names. `targets`
    is "all", or endings of their names. A RecipeError names one that fits nothing."""
    layers = tuple(f"{name}." for name in text_layers(model))
    left_out = read_weights_of(model)
    linears = (
        name
        for name in _named_linears(model)
        if name.rpartition(".")[2] not in _GATES and name not in left_out
    )
    modules, parameters = (
        [name for name in names if name.startswith(layers)] for names in (linears, _named_stacks(model))
    )
    if isinstance(targets, str):
        if not modules and not parameters:
            found = f"{type(model).__name__}, in whose layers PEFT finds no linear ones"
            raise RecipeError("model.lora", found, "a decoder with linear layers")
        return modules, parameters
    for target in targets:
        if not any(_ends(name, target) for name in (*modules, *parameters)):
            known = list(dict.fromkeys(name.rpartition(".")[2] for name in (*modules, *parameters)))
            near = get_close_matches(target.rpartition(".")[2], known, n=2, cutoff=0.5)
            expected = f"endings of the names of linear layers, such as {', '.join(known)}"
            advice = f"did you mean {' or '.join(near)}?" if near else ""
            raise RecipeError("model.lora.targets", target, expected, advice)
    modules, parameters = (
        [name for name in names if any(_ends(name, target) for target in targets)]
        for names in (modules, parameters)
    )
    return modules, parameters


def _require_useful_rank(model: PreTrainedModel, rank: int, weights: Iterable[str]) -> None:
    """Raise a RecipeError if no layer is as wide as the rank: a matrix's rank is at most its lesser side."""
    sides = {name: min(model.get_parameter(name).shape[-2:]) for name in weights}
    widest = max(sides, key=lambda name: sides[name])
    if rank > sides[widest]:
        expected = f"at most {sides[widest]}, the lesser side of {widest}: no adapted layer is wider"
        raise RecipeError("model.lora.rank", str(rank), expected)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _endings(names: Sequence[str], everywhere: Iterable[str], parts: int) -> list[str]:
    """Cut names to their last parts, as PEFT's configs have them, unless these fit other layers too."""
    short = sorted({".".join(name.split(".")[-parts:]) for name in names})
    meant = [name for name in everywhere if any(_ends(name, ending) for ending in short)]
    return short if set(meant) == set(names) else list(names)


def text_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the layers of the text decoder by name, in their order. A vision tower's are not among them."""
    from practicum.compat.transformers import GradientCheckpointingLayer

    decoder = model.get_decoder()
    (prefix,) = [name for name, module in model.named_modules() if module is decoder]
    inside = f"{prefix}." if prefix else ""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and name.startswith(inside)
    }


def _named_linears(model: PreTrainedModel) -> Iterator[str]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear) or _is_transposed(module)) and module is not head:
            yield name


def _named_stacks(model: PreTrainedModel) -> Iterator[str]:
    """Yield the weights of all experts of a layer in one parameter."""
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and name.rpartition(".")[0] not in convolutions:
            yield name


def _is_transposed(module: nn.Module) -> bool:
    """Return True for GPT-2's linear layers, whose weights lie the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
