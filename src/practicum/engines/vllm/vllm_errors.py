"""What goes wrong when vLLM starts, as sentences that say what to do: from its exception or from its log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from practicum.engines.vllm.vllm_messages import VllmSetup
from practicum.errors import VLLM_INSTALL, EngineError

_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
_LONGEST = 300
_SHOWN = 8
"""Lines of a log that an error shows."""
_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s?(?:(?:INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ \[[^]]*\]\s?)?")
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b|\berror: |^\s*Value error, ")


class _Rule(NamedTuple):
    """What vLLM says, and the sentences for a recipe's engine and for `practicum serve`."""

    pattern: str
    engine: str = ""
    """With fields {where} (a section of the recipe), {context}, {kv_gb} and {heads}; empty: unknown here."""
    serve: str = ""


_RULES = (
    _Rule(
        r"head.?size|head_dim",
        "vLLM can't compute attention with this model's head size on this device{heads}: use "
        "{where}.engine: torch, or another model",
        "vLLM can't compute attention heads of this model's size on this device: use --engine torch",
    ),
    _Rule(
        r"greater than the derived",
        "a context of {context} tokens is longer than the model's: lower {where}.context",
        "the context is longer than the model's: lower it",
    ),
    _Rule(
        r"KV cache is needed|memory for the cache blocks",
        "KV memory of {kv_gb} GiB is too small for one sequence of {context} tokens: raise "
        "{where}.vllm.kv_gb, or lower {where}.context",
        "there is too little KV memory for one sequence: raise --kv-gb, or lower --context",
    ),
    _Rule(
        r"ddress already in use",
        serve="the port is in use: end the process that has it, or choose another --port",
    ),
    _Rule(
        r"out of memory|MemoryError|allocate memory",
        serve="the model does not fit the memory: use a smaller one or --dtype bfloat16, or lower --kv-gb",
    ),
    _Rule(
        r"unrecognized arguments",
        serve="vLLM does not know one of the options after --: see vllm serve --help=all",
    ),
    _Rule(
        r"architectures? .*not supported|does not recognize this architecture",
        "vLLM does not know this model: use {where}.engine: torch",
        "vLLM does not know this kind of model: use --engine torch",
    ),
    _Rule(
        r"EngineArgs.*unexpected keyword",
        "{where}.vllm.options has a name that vLLM does not know: remove it",
    ),
    _Rule(
        r"divisible by tensor parallel size",
        "the model's attention heads can't be split over as many devices: lower {where}.vllm.tensor_parallel",
    ),
    _Rule(
        r"World size .* larger than the number of available",
        "{where}.vllm.tensor_parallel is more than there are devices here: lower it",
    ),
    _Rule(
        r"WorkerProc initialization failed",
        "one of vLLM's workers could not start: with {where}.vllm.tensor_parallel: 1 the reason is told",
    ),
)
"""The first that fits counts."""


@contextmanager
def explain(setup: VllmSetup) -> Iterator[None]:
    """Turns errors in the block into EngineErrors that say what to do."""
    try:
        yield
    except EngineError:
        raise
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise EngineError(f"vLLM is not installed: {VLLM_INSTALL}") from error
        raise EngineError(f"vLLM can't be imported: {error}{_neighbours(error)}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for rule in _RULES:
            if rule.engine and re.search(rule.pattern, text, re.IGNORECASE):
                kv_gb = f"{setup.kv_bytes / 2**30:.3g}"
                sentence = rule.engine.format(
                    where=setup.where, context=setup.context, kv_gb=kv_gb, heads=_head_sizes()
                )
                raise EngineError(f"{sentence}. vLLM says: {_short(text)}") from error
        raise EngineError(f"vLLM did not start: {_short(text)}{_neighbours(error)}") from error


def cause_in_log(log: str) -> str:
    """The likely cause of the end of `vllm serve` and the fix, or where to look."""
    text = "\n".join(_errors(log))
    for rule in _RULES:
        if rule.serve and re.search(rule.pattern, text, re.IGNORECASE):
            return rule.serve
    return "its last lines may say why; --verbose shows all of them"


def last_lines(log: str) -> str:
    """The errors in a log, else its end, without process names and times."""
    lines = _errors(log) or [line for line in _plain(log) if line.strip()]
    return "\n".join(f"  | {line[:300]}" for line in lines[-_SHOWN:])


def _errors(log: str) -> list[str]:
    """Each error once, in the order of the first time."""
    return list(dict.fromkeys(line for line in _plain(log) if _ERROR.search(line)))


def _plain(log: str) -> list[str]:
    return [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]


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


def _neighbours(error: Exception) -> str:
    """Builds of torch's companion packages for another torch break the import of vLLM."""
    if any(name in str(error) for name in (*_NEIGHBOURS, "libtorch")):
        return f". Builds for another torch are in the way: pip uninstall -y {' '.join(_NEIGHBOURS)}"
    return ""


def _short(text: str) -> str:
    """One line, without what pydantic puts around it."""
    line = " ".join(re.sub(r"\d+ validation errors? for \w+\s+Value error, ", "", text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
