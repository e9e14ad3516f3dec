"""Errors of vLLM's start with the recipe key to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from practicum.engines.vllm.vllm_setup import VllmSetup
from practicum.errors import VLLM_INSTALL, EngineError

_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
_LONGEST = 300

_RULES = (
    (
        r"head.?size|head_dim",
        "vLLM can't compute attention with this model's head size on this device{heads}: use "
        "{where}.engine: torch, or another model",
    ),
    (
        r"greater than the derived",
        "a context of {context} tokens is longer than the model's: lower {where}.context",
    ),
    (
        r"KV cache is needed|memory for the cache blocks",
        "KV memory of {kv_gb} GiB is too small for one sequence of {context} tokens: raise "
        "kv_cache_memory_bytes in {where}.vllm.options, or lower {where}.context",
    ),
    (
        r"architectures? .*not supported|does not recognize this architecture",
        "vLLM does not know this model: use {where}.engine: torch",
    ),
    (r"EngineArgs.*unexpected keyword", "{where}.vllm.options has a name that vLLM does not know: remove it"),
    (
        r"divisible by tensor parallel size",
        "the model's attention heads can't be split over as many devices: lower {where}.vllm.tensor_parallel",
    ),
    (
        r"World size .* larger than the number of available",
        "{where}.vllm.tensor_parallel is more than the devices of this machine: lower it",
    ),
)
"""Patterns in vLLM's errors and what they mean for a recipe. The first that matches counts."""


@contextmanager
def explain(setup: VllmSetup, logged: Callable[[], str]) -> Iterator[None]:
    """Turn errors in the block into EngineErrors that say what to do. `logged` returns vLLM's own error."""
    try:
        yield
    except EngineError:
        raise
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise EngineError(f"vLLM is not installed: {VLLM_INSTALL}") from error
        raise EngineError(f"vLLM can't be imported: {error}{_neighbours(str(error))}") from error
    except Exception as error:
        text = logged() or f"{type(error).__name__}: {error}"
        for pattern, meaning in _RULES:
            if re.search(pattern, text, re.IGNORECASE):
                kv_gb = f"{setup.kv_bytes / 2**30:.3g}"
                sentence = meaning.format(
                    where=setup.where, context=setup.context, kv_gb=kv_gb, heads=_head_sizes()
                )
                raise EngineError(f"{sentence}. vLLM says: {_short(text)}") from error
        raise EngineError(f"vLLM did not start: {_short(text)}{_neighbours(text)}") from error


def _head_sizes() -> str:
    """Those that vLLM itself lists, on a CPU."""
    try:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]
            CPUAttentionBackend,
        )
    except ImportError:  # another release: the sentence is good without them
        return ""
    if not current_platform.is_cpu():
        return ""
    return f" (it lists {', '.join(map(str, CPUAttentionBackend.get_supported_head_sizes()))})"


def _neighbours(text: str) -> str:
    """Explain builds of torch's companion packages for another torch, which break the import of vLLM."""
    if any(name in text for name in (*_NEIGHBOURS, "libtorch")):
        return f". Builds for another torch are in the way: pip uninstall -y {' '.join(_NEIGHBOURS)}"
    return ""


def _short(text: str) -> str:
    """One line, without what pydantic puts around it."""
    line = " ".join(re.sub(r"\d+ validation errors? for \w+\s+Value error, ", "", text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
