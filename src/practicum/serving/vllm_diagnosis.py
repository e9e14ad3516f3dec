"""Why vLLM did not start, found in its log: a sentence with what to do."""

from __future__ import annotations

import re

SHOWN = 8
"""Lines of the log that an error shows."""
_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s?(?:(?:INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ \[[^]]*\]\s?)?")
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b|\berror: |^\s*Value error, ")
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"head_dim|head[ _]size",
        "vLLM can't compute attention heads of this model's size on this device: use --engine torch",
    ),
    (
        r"max_model_len \(\d+\) is greater than",
        "the context is longer than the model's: lower it",
    ),
    (
        r"KV cache|cache blocks",
        "there is too little KV memory for one sequence: raise --kv-gb, or lower --context",
    ),
    (
        r"ddress already in use",
        "the port is in use: end the process that has it, or choose another --port",
    ),
    (
        r"out of memory|MemoryError|allocate memory",
        "the model does not fit the memory: use a smaller one or --dtype bfloat16, or lower --kv-gb",
    ),
    (
        r"unrecognized arguments",
        "vLLM does not know one of the options behind --: see vllm serve --help=all",
    ),
    (
        r"[Mm]odel architectures? .* not supported",
        "vLLM does not know this kind of model: use --engine torch",
    ),
)


def cause_of(log: str) -> str:
    """The likely cause and the fix, or where to look."""
    told = "\n".join(_errors(log))
    for pattern, sentence in _CAUSES:
        if re.search(pattern, told):
            return sentence
    return "its last lines may say why; --verbose shows all of them"


def last_lines(log: str) -> str:
    """The errors in a log, else its end, without process names and times."""
    lines = _errors(log) or [line for line in _plain(log) if line.strip()]
    return "\n".join(f"  | {line[:300]}" for line in lines[-SHOWN:])


def _errors(log: str) -> list[str]:
    """Each error once, in the order of the first time."""
    return list(dict.fromkeys(line for line in _plain(log) if _ERROR.search(line)))


def _plain(log: str) -> list[str]:
    return [_PREFIX.sub("", line).rstrip() for line in log.splitlines()]
