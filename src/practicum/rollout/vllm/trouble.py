"""What goes wrong when vLLM starts, as sentences with the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from practicum.errors import VLLM_INSTALL, EngineError
from practicum.rollout.vllm.setup import VllmSetup

_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
_RULES: list[tuple[str, str]] = [
    (
        r"head.?size|head_dim",
        "vLLM can't compute attention with this model's head size on this device (on a CPU it knows "
        "32, 48, 64, 80, 96, 112, 128, 160, 192, 224 and 256): use engine: torch, or another model",
    ),
    (
        r"max_model_len|max_position_embeddings|maximum (model|context) length",
        "the context is longer than the model's: lower rollout.context",
    ),
    (
        r"KV cache|kv_cache|available memory|No available memory",
        "the KV memory is too small for one sequence of this context: raise vllm.kv_gb or lower "
        "rollout.context",
    ),
    (
        r"architectures? .*not supported",
        "vLLM does not know this model: use engine: torch",
    ),
]


@contextmanager
def explain(setup: VllmSetup) -> Iterator[None]:
    """Errors of what is in the block as EngineErrors that say what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise EngineError(f"vLLM is not installed: {VLLM_INSTALL}") from error
        raise EngineError(f"vLLM can't be imported: {error}{_neighbours(error)}") from error
    except EngineError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        for pattern, advice in _RULES:
            if re.search(pattern, said, re.IGNORECASE):
                raise EngineError(f"{advice}. vLLM says: {_short(said)}") from error
        raise EngineError(f"vLLM did not start: {_short(said)}{_neighbours(error)}") from error


def _neighbours(error: Exception) -> str:
    """Builds of torch's neighbours for another torch break the import of vLLM."""
    if any(name in str(error) for name in (*_NEIGHBOURS, "torchvision::nms", "libtorch")):
        return f". Builds for another torch are in the way: pip uninstall -y {' '.join(_NEIGHBOURS)}"
    return ""


def _short(said: str) -> str:
    return said if len(said) < 600 else said[:600] + " …"
