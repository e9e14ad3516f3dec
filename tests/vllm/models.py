"""Tiny models that vLLM can compute on a CPU, engines over them, and a look at the process table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from practicum.engines.vllm.vllm_setup import VllmSetup
from practicum.models.load_model import load_tokenizer, make_model, ready
from practicum.recipe.schema.recipe import MakeModel, Model

KV_BYTES = 16 * 2**20


def make_tiny(seed: int = 0, **more: Any) -> PreTrainedModel:
    """A tiny model, with weights so large that its answers differ."""
    spec = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "context": 128}
    make = MakeModel.model_validate(spec | more)
    model = make_model(make, load_tokenizer(Model(make=make)), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return ready(model, torch.device("cpu"))


def save_model(folder: Path, head_dim: int = 32, **more: Any) -> PreTrainedModel:
    """A tiny model in a folder, with its tokenizer."""
    model = make_tiny(head_dim=head_dim, **more)
    model.save_pretrained(folder)
    load_tokenizer(Model(make=MakeModel())).save_pretrained(folder)
    return model


def setup_of(folder: Path, context: int = 128, **more: Any) -> VllmSetup:
    """A vLLM engine over a saved model, in one thread."""
    chosen: dict[str, Any] = {"slots": 32, "kv_bytes": KV_BYTES, "max_logprobs": 64, "threads": 1}
    return VllmSetup(str(folder), "float32", context, **chosen | more)


def descendants(pid: int) -> dict[int, str]:
    """The processes below a process, with their names."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # it has ended meanwhile
            state, parent = rest.split()[:2]
            if state not in "ZX":
                parents[int(entry.name)], names[int(entry.name)] = int(parent), name
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return {one: names[one] for one in found - {pid}}


def still_there(pids: Iterable[int]) -> list[int]:
    """Which of these processes are still there."""
    there = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        there += [] if state in "ZX" else [pid]
    return there


def await_true(what: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)
