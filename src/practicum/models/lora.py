"""LoRA by PEFT: small trained matrices beside the frozen linear layers of a model, its base.

`add_adapter` puts PEFT's layers around the model's own, so the model keeps its class, its attention and its
norms; `load_model.ready` is called after it. The base is never written to: with the adapter off it computes
what it did before, bit for bit, and merged weights are made anew each time, from it.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from practicum.errors import MissingExtraError, RecipeError
from practicum.models.lora_product import ADAPTER, Factors, fuse_adapter

if TYPE_CHECKING:  # whoever only asks for names needs neither
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from practicum.recipe.schema.recipe import Lora

M = TypeVar("M", bound=nn.Module)

# PEFT imports bitsandbytes where it is installed, which then tells of kernels that nothing here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_PARTS = (".lora_A.", ".lora_B.")
WRAPPED = ".base_layer"
"""What PEFT puts into the names of weights that it wraps."""
_GATES = ("gate", "router", "shared_expert_gate")
_INIT = {"kaiming": True, "gaussian": "gaussian"}
_SAMPLE = 64
"""Numbers of each tensor that go into a fingerprint with their places."""


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int, source: str | None = None) -> None:
    """Put a new adapter on a model on the CPU; only its weights are trained from then on.

    It starts without effect (B = 0); A is a function of the seed. `source` is where the base came from.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtraError("model.lora", "lora") from None
    modules, parameters = find_targets(model, lora.targets)
    _require_useful_rank(model, lora.rank, modules, parameters)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (PEFT divides it, whatever its type)
        target_modules=_endings(modules, _named_linears(model), 1),
        target_parameters=_endings(parameters, _named_stacks(model), 2) or None,
        init_lora_weights=_INIT[lora.init],  # pyright: ignore[reportArgumentType]
        fan_in_fan_out=any(_is_transposed(model.get_submodule(name)) for name in modules),
        base_model_name_or_path=source,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of what is meant, such as several parameters of one module.
        warnings.simplefilter("ignore", UserWarning)
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for name, parameter in model.named_parameters():
        if is_adapter(name):  # updates would be lost in the rounding of half precision
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    fuse_adapter(model)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return any(part in name for part in _PARTS)


def adapter_config(model: PreTrainedModel) -> LoraConfig:
    """PEFT's config of a model's adapter."""
    configs: Any = model.peft_config
    return configs[ADAPTER]


def has_adapter(model: nn.Module) -> bool:
    """Whether a model, or a part of one, has an adapter."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def trained_names(model: nn.Module) -> frozenset[str] | None:
    """The parameters of a model with an adapter that training changes; None for all of another model's."""
    if not has_adapter(model):
        return None
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def describe_adapter(model: nn.Module) -> str:
    """How large the adapter is, in a sentence."""
    trained = sum(p.numel() for name, p in model.named_parameters() if is_adapter(name))
    share = trained / sum(p.numel() for p in model.parameters())
    layers = len(list(_adapted_layers(model)))
    return f"adapter: {trained / 1e6:,.2f}M of them are trained ({share:.1%}), beside {layers} weights"


def needless_rank(model: PreTrainedModel) -> str | None:
    """A sentence about adapted layers that are narrower than the adapter's rank, if there are some."""
    rank = adapter_config(model).r
    narrow: dict[str, int] = {}
    layer: Any
    for name, layer in model.named_modules():
        if ADAPTER in (getattr(layer, "lora_A", None) or ()):
            side = min(layer.in_features, layer.out_features)
            if side < rank:
                narrow[getattr(layer, "parameter_name", name.rpartition(".")[2])] = side
    if not narrow:
        return None
    told = ", ".join(f"{name} ({side})" for name, side in narrow.items())
    return (
        f"model.lora.rank {rank} is above the lesser side of {told}: what is above it there costs memory and "
        "time, and adds nothing"
    )


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model computes as its base alone; nobody else may use it meanwhile."""
    # Not by PEFT's enable_adapters, which also changes requires_grad: sharded weights do not follow that.
    layers: list[Any] = list(_adapted_layers(model))
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def copy_on_base(model: M) -> M:
    """A deep copy of a model; one with an adapter has its own adapter then, on the same base in memory."""
    frozen = [p for p in model.parameters() if not p.requires_grad] if has_adapter(model) else []
    return copy.deepcopy(model, {id(parameter): parameter for parameter in frozen})


@torch.no_grad()
def merged_weights(
    model: nn.Module, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a plain model that computes what base and adapter do, by its names, tied ones once.

    Sums are in float32 (float64, if the model is), from the base as it was loaded, which stays as it is.
    `gather` gives the whole of a sharded weight.
    """
    layers: dict[int, Any] = {}
    for layer in _adapted_layers(model):
        base: Any = layer.get_base_layer()
        layers[id(getattr(base, getattr(layer, "parameter_name", "weight")))] = layer
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        weight = gather(parameter.detach())
        if id(parameter) in layers:
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight = (weight.to(wide) + _delta(layers[id(parameter)], gather, wide)).to(weight.dtype)
        yield name.replace(WRAPPED, ""), weight


def _delta(layer: Any, gather: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """What a layer's adapter adds to its weight."""
    *both, scaling = Factors.of(layer)
    down, up = (gather(part.detach()).to(dtype) for part in both)
    if (experts := getattr(layer, "num_experts", 1)) > 1:
        down = down.reshape(experts, -1, down.shape[-1])
        up = up.reshape(len(up), -1, experts)
        order = "xoi" if layer._did_swap_in_out_features else "xio"
        return torch.einsum(f"orx,xri->{order}", up, down) * scaling
    delta = up @ down * scaling
    return delta.t() if layer.fan_in_fan_out else delta


@torch.no_grad()
def base_fingerprint(model: nn.Module, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> str:
    """Tells bases apart, whatever number type they are held in: of all weights but the adapter's.

    `gather` gives the whole of a sharded weight.
    """
    digest = hashlib.sha256()
    weights = ((name.replace(WRAPPED, ""), p) for name, p in model.named_parameters() if not is_adapter(name))
    for name, parameter in sorted(weights):
        bits = gather(parameter.detach()).to(torch.bfloat16).flatten().view(torch.int16)
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].tolist()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(parameter.shape)} {total} {sample}\n".encode())
    return digest.hexdigest()[:16]


def find_targets(model: PreTrainedModel, targets: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """The linear layers to adapt, and the stacked weights of experts, by their full names.

    `targets` is "all", or endings of their names. A RecipeError names one that fits nothing.
    """
    modules, parameters = list(_text_linears(model)), list(_text_stacks(model))
    if isinstance(targets, str):
        if not modules and not parameters:
            found = f"{type(model).__name__}, in whose layers PEFT finds no linear ones"
            raise RecipeError("model.lora", found, "a decoder with linear layers")
        return modules, parameters
    for target in targets:
        if not any(_ends(name, target) for name in (*modules, *parameters)):
            raise _no_target(model, target, (*modules, *parameters))

    def chosen(names: Iterable[str]) -> list[str]:
        return [name for name in names if any(_ends(name, target) for target in targets)]

    return chosen(modules), chosen(parameters)


def _require_useful_rank(
    model: PreTrainedModel, rank: int, modules: Sequence[str], parameters: Sequence[str]
) -> None:
    """A RecipeError if no layer is as wide as the rank: a matrix's rank is at most its lesser side."""
    weights = [f"{name}.weight" for name in modules] + list(parameters)
    sides = {name: min(model.get_parameter(name).shape[-2:]) for name in weights}
    widest = max(sides, key=lambda name: sides[name])
    if rank > sides[widest]:
        shape = " × ".join(map(str, model.get_parameter(widest).shape[-2:]))
        expected = f"at most {sides[widest]}: {widest} is {shape}, and no layer that is adapted is wider"
        advice = "more would cost memory and time, and add nothing; model.lora.targets says which layers"
        raise RecipeError("model.lora.rank", str(rank), expected, advice)


def _no_target(model: PreTrainedModel, target: str, names: Iterable[str]) -> RecipeError:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    near = difflib.get_close_matches(target.rpartition(".")[2], known, n=2, cutoff=0.5)
    expected = f"endings of the names of linear layers, such as {', '.join(known)}"
    others = [name for name, _ in model.named_modules() if _ends(name, target)]
    if others:
        found = target if others[0] == target else f"{target}, which is {others[0]}"
        advice = "the head, embeddings, norms, routers and a vision tower stay as they are"
        return RecipeError("model.lora.targets", found, expected, advice)
    advice = f"did you mean {' or '.join(near)}?" if near else "leave targets out to adapt all of them"
    return RecipeError("model.lora.targets", f"{target}, which no layer's name ends with", expected, advice)


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _endings(names: Sequence[str], everywhere: Iterable[str], parts: int) -> list[str]:
    """Names cut to their last parts, as PEFT's configs have them, unless these fit other layers too."""
    short = sorted({".".join(name.split(".")[-parts:]) for name in names})
    meant = [name for name in everywhere if any(_ends(name, ending) for ending in short)]
    return short if set(meant) == set(names) else list(names)


def text_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of the text decoder by name, in their order; a vision tower's are not among them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder = model.get_decoder()
    (prefix,) = [name for name, module in model.named_modules() if module is decoder]
    inside = f"{prefix}." if prefix else ""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and name.startswith(inside)
    }


def _text_linears(model: PreTrainedModel) -> Iterator[str]:
    """Linear layers of the text decoder's layers; routers are not among them."""
    layers = _text_layers(model)
    for name in _named_linears(model):
        if name.startswith(layers) and name.rpartition(".")[2] not in _GATES:
            yield name


def _text_stacks(model: PreTrainedModel) -> Iterator[str]:
    """Weights of all experts of a layer in one parameter."""
    layers = _text_layers(model)
    return (name for name in _named_stacks(model) if name.startswith(layers))


def _text_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Beginnings of the names in the layers of the text decoder."""
    return tuple(f"{name}." for name in text_layers(model))


def _named_linears(model: PreTrainedModel) -> Iterator[str]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear) or _is_transposed(module)) and module is not head:
            yield name


def _named_stacks(model: PreTrainedModel) -> Iterator[str]:
    return (name for name, parameter in model.named_parameters() if parameter.dim() == 3)


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's linear layers, whose weights lie the other way round."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _adapted_layers(model: nn.Module) -> Iterator[Any]:
    """PEFT's layers that have the student's adapter."""
    return (m for m in model.modules() if ADAPTER in (getattr(m, "lora_A", None) or ()))
