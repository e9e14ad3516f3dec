"""What goes wrong when vLLM starts, as sentences with the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from practicum.engines.vllm.vllm_messages import VllmSetup
from practicum.errors import VLLM_INSTALL, EngineError

_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
_LONGEST = 300


@contextmanager
def explain(setup: VllmSetup) -> Iterator[None]:
    """Errors of what is in the block as EngineErrors that say what to do."""
    try:
        yield
    except EngineError:
        raise
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise EngineError(f"vLLM is not installed: {VLLM_INSTALL}") from error
        raise EngineError(f"vLLM can't be imported: {error}{_neighbours(error)}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        for pattern, advice in _RULES:
            if re.search(pattern, said, re.IGNORECASE):
                raise EngineError(f"{advice(setup)}. vLLM says: {_short(said)}") from error
        raise EngineError(f"vLLM did not start: {_short(said)}{_neighbours(error)}") from error


def _heads(setup: VllmSetup) -> str:
    return (
        f"vLLM can't compute attention with this model's head size on this device{_head_sizes()}: use "
        f"{setup.where}.engine: torch, or another model"
    )


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


def _kv(setup: VllmSetup) -> str:
    return (
        f"KV memory of {setup.kv_bytes / 2**30:.3g} GiB is too small for one sequence of {setup.context} "
        f"tokens: raise {setup.where}.vllm.kv_gb, or lower {setup.where}.context"
    )


def _context(setup: VllmSetup) -> str:
    return f"a context of {setup.context} tokens is longer than the model's: lower {setup.where}.context"


def _architecture(setup: VllmSetup) -> str:
    return f"vLLM does not know this model: use {setup.where}.engine: torch"


def _options(setup: VllmSetup) -> str:
    return f"{setup.where}.vllm.options has a name that vLLM does not know: remove it"


def _workers(setup: VllmSetup) -> str:
    return (
        f"{setup.where}.vllm.options asks for several workers, and this engine is one process: remove "
        "tensor_parallel_size and the like"
    )


_RULES: list[tuple[str, Callable[[VllmSetup], str]]] = [
    (r"head.?size|head_dim", _heads),
    (r"KV cache is needed|memory for the cache blocks", _kv),
    (r"greater than the derived max_model_len", _context),
    (r"architectures? .*not supported|does not recognize this architecture", _architecture),
    (r"EngineArgs.*unexpected keyword", _options),
    (r"daemonic processes are not allowed", _workers),
]
"""What vLLM says, and the sentence for it; the first that fits counts."""


def _neighbours(error: Exception) -> str:
    """Builds of torch's neighbours for another torch break the import of vLLM."""
    if any(name in str(error) for name in (*_NEIGHBOURS, "libtorch")):
        return f". Builds for another torch are in the way: pip uninstall -y {' '.join(_NEIGHBOURS)}"
    return ""


def _short(said: str) -> str:
    """One line, without what pydantic puts around it."""
    line = " ".join(re.sub(r"\d+ validation errors? for \w+\s+Value error, ", "", said).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
