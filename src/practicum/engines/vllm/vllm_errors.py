"""Errors of vLLM's start with the recipe key to change."""

from __future__ import annotations

import re

from practicum.engines.vllm.vllm_setup import INSTALL, VllmSetup
from practicum.errors import EngineError

_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
_LONGEST = 300
_RULES = {
    r"head.?size|head_dim": "vLLM can't compute attention with this model's head size on this device "
    "(docs/engines.md lists those of a CPU): use {where}.engine: torch, or another model",
    r"greater than the derived": "a context of {context} tokens is longer than the model's: lower "
    "{where}.context",
    r"KV cache is needed|memory for the cache blocks": "KV memory of {kv_gb:.3g} GiB is too small for one "
    "sequence of {context} tokens: raise kv_cache_memory_bytes in {where}.vllm, or lower "
    "{where}.context",
    r"architectures? .*not supported|does not recognize this architecture": "vLLM does not know this model: "
    "use {where}.engine: torch",
    r"EngineArgs.*unexpected keyword": "{where}.vllm has a name that vLLM does not know: remove it",
    r"divisible by tensor parallel size": "the model's attention heads can't be split over as many devices: "
    "lower {where}.vllm.tensor_parallel_size",
    r"World size .* larger than the number of available": "lower {where}.vllm.tensor_parallel_size to at "
    "most the devices of this machine",
}
"""Patterns in vLLM's errors and what they mean for a recipe. The first that matches counts."""


def explain(error: Exception, setup: VllmSetup, logged: str) -> EngineError:
    """Return an error that says what to do. `logged` is vLLM's own error, if it logged one."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
        return EngineError(f"vLLM is not installed: {INSTALL}")
    text = logged or f"{type(error).__name__}: {error}"
    line = " ".join(re.sub(r"\d+ validation errors? for \w+\s+Value error, ", "", text).split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
    for pattern, meaning in _RULES.items():
        if re.search(pattern, text, re.IGNORECASE):
            kv_gb = setup.arguments()["kv_cache_memory_bytes"] / 2**30
            sentence = meaning.format(where=setup.where, context=setup.context, kv_gb=kv_gb)
            return EngineError(f"{sentence}. vLLM says: {line}")
    if any(name in text for name in (*_NEIGHBOURS, "libtorch")):
        line += f". Builds for another torch are in the way: pip uninstall -y {' '.join(_NEIGHBOURS)}"
    return EngineError(f"vLLM did not start: {line}")
