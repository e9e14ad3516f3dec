"""Devices by name. All code that depends on the kind of device is here.

Functions that query the machine import torch, the others do not.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from practicum.errors import EngineError, RecipeError

if TYPE_CHECKING:
    import torch

FORMS = "auto, cpu, cuda, cuda:N, xpu or mps"
HELP = "cpu, cuda, cuda:N, xpu, mps, or auto (the accelerator if the machine has one)."
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment variables that hide all accelerators from a process."""
_FORM = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
_COLLECTIVES = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _OWN_PAGES = 2**31 - 1, 2**28
"""Bytes of freed host memory that the process keeps, and the size of blocks that it never keeps."""
_MALLOC_SETTINGS = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
"""malloc settings of the user, which are not overridden."""
FUSED_OPTIMIZERS = ("cpu", "cuda", "xpu", "mps")


def is_device_name(name: str) -> bool:
    return _FORM.fullmatch(name) is not None


def is_accelerator_name(name: str) -> bool:
    """Return True for the name of an accelerator. `auto` is not one."""
    return name not in ("auto", "cpu")


def names_one_of_several(name: str) -> bool:
    """Return True for a name with a device number, such as cuda:1."""
    return ":" in name


def find_accelerator() -> torch.device | None:
    """Return this machine's accelerator, or None."""
    import torch

    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pick_device(name: str, key: str = "model.device") -> torch.device:
    """Return the device of this name. Raise a RecipeError if this machine does not have it."""
    import torch

    accelerator = find_accelerator()
    if name == "auto":
        return accelerator or torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        there = "no accelerator" if accelerator is None else f"{accelerator.type} only"
        advice = f"torch finds {there} on this machine: use cpu or auto"
        raise RecipeError(key, name, "a device of this machine", advice)
    if device.index is not None and device.index >= (count := torch.accelerator.device_count()):
        advice = f"torch finds {count}, numbered from 0"
        raise RecipeError(key, name, "a device of this machine", advice)
    return device


def describe_device(device: torch.device) -> str:
    """Return a message with the student's device and how well it was tested."""
    known = "only a simulated GPU" if device.type == "cuda" else "not even a simulated one"
    return f"the student samples on {device}, where practicum is untested ({known} was used in tests)"


def empty_cache(device: torch.device) -> None:
    _module(device, "empty_cache")


def keep_freed_memory() -> None:
    """Let the C library keep up to _KEPT bytes of freed memory for later allocations.

    By default it returns each large block to the system, which zero-fills its pages when the next block of
    that size is touched. This takes an eighth of an update's time. `malloc_trim` returns all memory.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt") and not _MALLOC_SETTINGS & set(os.environ):
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done."""
    _module(device, "synchronize")


def memory_of(device: torch.device) -> int | None:
    sizes = _module(device, "mem_get_info", device)
    return None if sizes is None else sizes[1]


def _module(device: torch.device, name: str, *args: Any) -> Any:
    """Call a function of torch's module for this kind of device. Return None if it has no such function."""
    import torch

    function = None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(*args)


def gpu_id(device: torch.device) -> str | None:
    """Return a GPU's name, which is equal in all processes, or None for other devices."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def is_out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def has_fused_optimizers(device: torch.device) -> bool:
    """Return True if torch has fused optimizers on this device."""
    return device.type in FUSED_OPTIMIZERS


def collective_backends(device: str) -> str:
    """Return the collective backends for tensors of this device and of the CPU."""
    if device not in _COLLECTIVES:
        raise EngineError(
            f"data-parallel ranks on {device} are not supported: use {' or '.join(_COLLECTIVES)}"
        )
    return _COLLECTIVES[device]


def random_states() -> dict[str, Any]:
    """Return the states of the accelerators' global generators by device type."""
    import torch

    return {"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {}


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the generators of this machine's devices to the states of `random_states`."""
    import torch

    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
