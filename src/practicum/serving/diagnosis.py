"""Why vLLM did not start, found in its log: a sentence with what to do."""

from __future__ import annotations

import re

SHOWN = 12
"""Lines of the log that an error shows."""
_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s?(?:(?:INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ \[[^]]*\]\s?)?")
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"[Hh]ead[ _]?(?:size|dim)[^\n]*(?:not supported|[Uu]nsupported|must be)"
        r"|(?:not supported|[Uu]nsupported)[^\n]*[Hh]ead[ _]?(?:size|dim)",
        "vLLM can't compute attention heads of this model's size on this device: use --engine torch",
    ),
    (
        r"max_model_len \(\d+\) is greater than|maximum context length|max_position_embeddings",
        "the context is longer than the model's: lower --context",
    ),
    (
        r"KV cache (?:is )?needed|No available memory for the cache blocks|larger than the available KV cache"
        r"|available KV cache memory|[Nn]ot enough .{0,40}KV|num_gpu_blocks",
        "there is too little KV memory for one sequence: raise --kv-gb, or lower --context",
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "the port is in use: end the process that has it, or choose another --port",
    ),
    (
        r"out of memory|MemoryError|Cannot allocate memory|can't allocate memory",
        "the model does not fit the memory: use a smaller one or --dtype bfloat16, or lower --kv-gb",
    ),
    (r"unrecognized arguments", "vLLM does not know one of the options behind --: see vllm serve --help=all"),
    (
        r"(?:architectures?|Model class)[^\n]*not supported|are not supported for now",
        "vLLM does not know this kind of model: use --engine torch",
    ),
)


def cause_of(log: str) -> str:
    """The likely cause and the fix, or where to look."""
    for pattern, sentence in _CAUSES:
        if re.search(pattern, log):
            return sentence
    return "its last lines may say why; --verbose shows all of them"


def last_lines(log: str) -> str:
    """The end of the log without process names and times: from the last error on, if one is near."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    lines = [line for line in lines if line.strip()]
    return "\n".join(f"  | {line[:300]}" for line in lines[-SHOWN:])
