"""Interfaces of PEFT that are not public: how its LoRA layers hold an adapter. Tested with PEFT 0.21.

PEFT is an extra, imported when an adapter is put on a model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from practicum.errors import EngineError, MissingExtraError

if TYPE_CHECKING:
    from peft import LoraConfig

TESTED = "0.21"
ADAPTER = "student"
"""The name under which PEFT holds an adapter."""

# PEFT imports bitsandbytes where it is installed, which then logs about kernels that nothing here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class Factors(NamedTuple):
    """The two small matrices of an adapter beside one layer, and the factor of their product."""

    down: Tensor
    up: Tensor
    scaling: float

    @classmethod
    def of(cls, layer: Any) -> Factors:
        return cls(layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER])


def _import_peft(key: str) -> Any:
    """Return PEFT. Without it, the error names the extra and the recipe's `key`."""
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise MissingExtraError(key, "lora") from None
    if not hasattr(BaseTunerLayer, "_disable_adapters"):
        raise EngineError(f"PEFT {peft.__version__} holds adapters in another way: install PEFT {TESTED}")
    return peft


def lora_config(key: str, **settings: Any) -> LoraConfig:
    return _import_peft(key).LoraConfig(**settings)


def read_config(key: str, folder: Path) -> LoraConfig:
    """Read the config of an adapter's folder."""
    return _import_peft(key).PeftConfig.from_pretrained(str(folder))


def inject(model: nn.Module, config: LoraConfig, seed: int = 0) -> None:
    """Wrap the model's layers in PEFT's. The adapter's initial weights are a function of the seed."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of what is meant, such as several parameters of one module.
        warnings.simplefilter("ignore", UserWarning)
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)


def adapter_config(model: Any) -> LoraConfig:
    return model.peft_config[ADAPTER]


def adapted_layers(model: nn.Module) -> Iterator[Any]:
    """Yield PEFT's layers that have the adapter."""
    return (m for m in model.modules() if ADAPTER in (getattr(m, "lora_A", None) or ()))


def adapted_weight(layer: Any) -> Tensor:
    """Return the weight of the base that a layer's adapter is beside."""
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def is_plain(module: nn.Module) -> bool:
    """Return True if PEFT adds the product of two matrices to what a linear layer computes, and no more."""
    if (type(module).__module__, type(module).__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    layer: Any = module
    return (
        list(layer.lora_A) == [ADAPTER]
        and not layer.lora_variant
        and not layer.lora_bias[ADAPTER]
        and not layer.merged
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity)
    )


def is_off(layer: Any) -> bool:
    return layer._disable_adapters


def turn_adapter(model: nn.Module, *, off: bool) -> None:
    """Turn the adapter off or on. PEFT's enable_adapters would also change requires_grad."""
    for layer in adapted_layers(model):
        layer._disable_adapters = off


def product(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """Return what these matrices of a layer's adapter add to its weight, before scaling."""
    if (experts := getattr(layer, "num_experts", 1)) > 1:
        down = down.reshape(experts, -1, down.shape[-1])
        up = up.reshape(len(up), -1, experts)
        order = "xoi" if layer._did_swap_in_out_features else "xio"
        return torch.einsum(f"orx,xri->{order}", up, down)
    return (up @ down).t() if layer.fan_in_fan_out else up @ down


def take_out(model: Any) -> dict[str, nn.Module]:
    """Put the layers that PEFT wrapped back in their places. Return the outermost wrappers by place."""
    wrapped: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in wrapped)
        if getattr(module, "lora_A", None) is not None and not is_inside:
            wrapped[name] = module
    for name, module in wrapped.items():
        model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    return wrapped
