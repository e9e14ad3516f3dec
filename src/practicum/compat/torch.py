"""Operators and attributes of torch that are not public. Tested with torch 2.13.

An operator is None where torch or the processor lacks it. Callers compute by public functions then.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor, nn

TESTED = "2.13"

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and (
    torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
)
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _HAS_ONEDNN else None
onednn_pack: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None) if _HAS_ONEDNN else None
cpu_flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
cpu_flash_backward: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)

# Finds functions of the libraries that torch is linked to.
_library = ctypes.CDLL(torch._C.__file__) if sys.platform == "linux" else None
_pause_openmp: Any = getattr(_library, "omp_pause_resource_all", None)
_SOFT = 1
_set_mkl_threads: Any = getattr(_library, "MKL_Set_Num_Threads_Local", None)
_set_mkl_dynamic: Any = getattr(_library, "MKL_Set_Dynamic", None)


def release_threads() -> None:
    """End the threads that wait to help the calling thread's operators. Its next operator makes new ones.

    Each thread that calls operators gets its own helpers. If they and their callers outnumber the cores,
    OpenMP has helpers sleep between operators, and waking them takes longer than most operators.
    """
    if _pause_openmp is not None:
        _pause_openmp(_SOFT)


def use_one_mkl_thread(*_: Any) -> None:
    """Have MKL use one thread for a product, in the calling thread and its helpers. Also a hook."""
    if _set_mkl_threads is not None and _set_mkl_dynamic is not None:
        _set_mkl_dynamic(1)  # for helpers
        _set_mkl_threads(1)


def use_own_mkl_threads(*_: Any) -> None:
    """Have MKL use torch's threads again, as torch sets it."""
    if _set_mkl_threads is not None and _set_mkl_dynamic is not None:
        _set_mkl_threads(torch.get_num_threads())
        _set_mkl_dynamic(0)


def write_count(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def has_hooks(module: nn.Module) -> bool:
    """Return True if something runs before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def make_empty(model: nn.Module, device: str) -> None:
    """Allocate tensors that are on the meta device. Tied ones stay tied, which `to_empty` undoes."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is None or not x.is_meta:
                    continue
                if id(x) not in made:
                    new = torch.empty_like(x, device=device)
                    is_parameter = isinstance(x, nn.Parameter)
                    made[id(x)] = x, nn.Parameter(new, x.requires_grad) if is_parameter else new
                tensors[name] = made[id(x)][1]  # pyright: ignore[reportArgumentType]
