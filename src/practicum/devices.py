"""Devices by their names: the one place that knows which kinds there are and what is special about each.

Names and their forms need no torch; what asks the machine imports it.
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
HELP = "cpu, cuda, cuda:N, xpu, mps, or auto: the machine's accelerator, if it has one."
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""The environment of a process that is to see none."""
_FORM = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
_COLLECTIVES = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT, _OWN_PAGES = 2**31 - 1, 2**28
"""Of host memory: bytes that stay with the process when they are freed, and blocks that never do."""
_MALLOC_SETTINGS = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX"}
"""Environment variables by which somebody has decided otherwise."""
FUSED_OPTIMIZERS = ("cpu", "cuda", "xpu", "mps")


def is_device_name(name: str) -> bool:
    return _FORM.fullmatch(name) is not None


def is_accelerator_name(name: str) -> bool:
    """Return True for the name of a GPU or the like; `auto` leaves it open."""
    return name not in ("auto", "cpu")


def names_one_of_several(name: str) -> bool:
    """Return True for the name of one of several accelerators, by its number."""
    return ":" in name


def find_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has, if it has one."""
    import torch

    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pick_device(name: str, key: str = "model.device") -> torch.device:
    """Return the device of this name; one that this machine does not have is a RecipeError."""
    import torch

    accelerator = find_accelerator()
    if name == "auto":
        return accelerator or torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if accelerator is None or accelerator.type != device.type:
        there = "no accelerator" if accelerator is None else f"{accelerator.type} only"
        advice = f"torch finds {there} here: use cpu or auto"
        raise RecipeError(key, name, "a device of this machine", advice)
    if device.index is not None and device.index >= (count := torch.accelerator.device_count()):
        advice = f"torch finds {count} of them, numbered from 0"
        raise RecipeError(key, name, "a device of this machine", advice)
    return device


def describe_device(device: torch.device) -> str:
    """Return a sentence on where the student samples, and what is known of such devices."""
    known = "its tests know a pretend GPU only" if device.type == "cuda" else "nor can its tests be"
    return f"the student samples on {device}; practicum was never tried on such a device, {known}"


def empty_cache(device: torch.device) -> None:
    _module(device, "empty_cache")


def keep_freed_memory() -> None:
    """Have the C library keep what is freed, up to _KEPT bytes, for what is allocated next.

    It would give each large block back to the system, which has to fill its pages with zeros when the next
    one of the same size is touched: an eighth of an update's time. `malloc_trim` gives all back. Threads take
    it from one heap, so that the engine's is not beside the learner's.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt") and not _MALLOC_SETTINGS & set(os.environ):
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        if not os.environ.get("NOARENA"):
            libc.mallopt(_M_ARENA_MAX, 1)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done."""
    _module(device, "synchronize")


def memory_of(device: torch.device) -> int | None:
    sizes = _module(device, "mem_get_info", device)
    return None if sizes is None else sizes[1]


def _module(device: torch.device, name: str, *args: Any) -> Any:
    """Call a function of torch's module for this kind of device; None where it has no such function."""
    import torch

    function = None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(*args)


def gpu_id(device: torch.device) -> str | None:
    """Return the name of a GPU that is the same in every process; None for other devices."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def is_out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def has_fused_optimizers(device: torch.device) -> bool:
    """Return True if torch has one kernel for all of a parameter's optimizer step there."""
    return device.type in FUSED_OPTIMIZERS


def collective_backends(device: str) -> str:
    """Return the backends that sum tensors of this device and of the CPU over ranks."""
    if device not in _COLLECTIVES:
        raise EngineError(
            f"data-parallel ranks on {device} are not supported: use {' or '.join(_COLLECTIVES)}"
        )
    return _COLLECTIVES[device]


def random_states() -> dict[str, Any]:
    """Return the states of the accelerators' global generators, by the kind of device."""
    import torch

    return {"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {}


def set_random_states(states: dict[str, Any]) -> None:
    """Continue drawing where `random_states` was taken, on devices that are here."""
    import torch

    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
