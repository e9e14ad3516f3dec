"""Tiny models that vLLM can compute on a CPU, engines over them, and a look at the process table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.engines.protocol import Engine, ScoreRequest, Scores
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.vllm_setup import VllmSetup
from practicum.learning.learner import Learner
from practicum.models.load_model import load_tokenizer, make_model, ready
from practicum.recipe.schema.recipe import MakeModel, Model, Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.local import LocalRoles, start_local

KV_BYTES = 16 * 2**20
MAKE = {"hidden": 64, "layers": 2, "heads": 2, "context": 128}


def make_tiny(seed: int = 0, **more: Any) -> PreTrainedModel:
    """A tiny model, with weights so large that its answers differ."""
    make = MakeModel.model_validate(MAKE | more)
    model = make_model(make, load_tokenizer(Model(random_init=make)), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return ready(model, torch.device("cpu"))


def save_model(folder: Path, **more: Any) -> PreTrainedModel:
    """A tiny model in a folder, with its tokenizer."""
    model = make_tiny(**more)
    model.save_pretrained(folder)
    load_tokenizer(Model(random_init=MakeModel())).save_pretrained(folder)
    return model


def setup_of(folder: Path, context: int = 128, **more: Any) -> VllmSetup:
    """A vLLM engine over a saved model, in one thread."""
    chosen: dict[str, Any] = {"slots": 32, "kv_bytes": KV_BYTES, "max_logprobs": 64, "threads": 1}
    return VllmSetup(str(folder), "float32", context, **chosen | more)


def descendants(pid: int) -> set[int]:
    """Return the processes below a process, but for the one that multiprocessing keeps."""
    found = set()
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            if "resource_tracker" not in arguments(process.pid):
                found.add(process.pid)
    return set(still_there(found))


def arguments(pid: int) -> str:
    """Return the command line of a process, or nothing if it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def still_there(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that still run."""
    there = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                there.append(pid)
    return there


def resident(pid: int) -> int:
    """Return the bytes of a process in memory."""
    return psutil.Process(pid).memory_info().rss


@contextmanager
def started(recipe: Mapping[str, Any] | Recipe) -> Iterator[LocalRoles]:
    """The roles of a recipe, given as its sections or whole, in this process."""
    if not isinstance(recipe, Recipe):
        tasks = {"sort": {"kind": "sort"}}
        recipe = Recipe.model_validate(
            {"name": "vllm", "model": {"random_init": MAKE}, "tasks": tasks} | dict(recipe)
        )
    roles = start_local(recipe, make_plan(recipe), Watch(recipe.checks, print))
    try:
        yield roles
    finally:
        roles.close()


def update(learner: Learner, size: float = 0.02) -> dict[str, Tensor]:
    """Change the weights, as an optimizer step does. Return those of before."""
    before = {name: tensor.detach().clone() for name, tensor in learner.named_weights()}
    generator = torch.Generator().manual_seed(learner.version)
    with torch.no_grad():
        for _, tensor in learner.named_weights():
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    learner.version += 1
    return before


def logprobs(scorer: Engine | PreTrainedModel, rows: Iterable[ScoreRequest]) -> Tensor:
    """Return the logprobs of all rows by an engine, or by a torch engine with a model."""
    engine = TorchEngine(scorer, slots=1, context=2) if isinstance(scorer, PreTrainedModel) else scorer

    async def run() -> list[Scores]:
        return await asyncio.gather(*(engine.score(row) for row in rows))

    try:
        return torch.cat([scores.logprobs for scores in asyncio.run(run())])
    finally:
        if engine is not scorer:
            engine.close()


def await_true(what: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)
