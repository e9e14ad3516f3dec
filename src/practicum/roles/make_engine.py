"""The student's engine, by the kind that the recipe names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.devices import describe_device
from practicum.engines.protocol import Engine
from practicum.engines.torch.engine_process import EngineProcess, ProcessEngine
from practicum.engines.torch.engine_thread import share_order
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.make_vllm import EngineSize, engine_of_adapted, engine_of_model, takes_adapter
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.models.load_model import context_length, load_model
from practicum.models.lora import copy_on_base
from practicum.places.adapter_teachers import AdapterTeacher
from practicum.places.place import TeacherPlace
from practicum.places.vllm_teacher import VllmModel
from practicum.recipe.derived import lag, rollout_context
from practicum.recipe.schema.recipe import Recipe

Weights = Iterable[tuple[str, Tensor]]


def describe_engines(*parts: Engine | TeacherPlace) -> list[str]:
    """What there is to say of those with their own process, and of devices other than the CPU; and warnings:
    of more threads than the machine has cores, and of a torch engine whose numbers depend on its batch."""
    lines: list[str] = []
    elsewhere: list[str] = []
    depends: list[str] = []
    at_once = torch.get_num_threads()
    models = [part.base if isinstance(part, AdapterTeacher) else part for part in parts]
    for part in dict.fromkeys(models):
        if isinstance(part, ProcessEngine):
            facts = part.process.ready()
            lines.append(part.process.describe())
            at_once += facts.threads
            if not facts.invariant:
                depends.append(_depends("cpu", facts.dtype, alone=facts.alone))
        if isinstance(part, TorchEngine) and part.runner.device.type != "cpu":
            elsewhere.append(describe_device(part.runner.device))
        if isinstance(part, TorchEngine) and not part.runner.invariant:
            runner = part.runner
            depends.append(_depends(runner.device.type, str(runner.model.dtype), alone=part.alone))
        elif isinstance(part, VllmEngine):
            lines.append(part.describe())
        elif isinstance(part, VllmModel):
            lines += part.describe()
            at_once += 0 if part.sleeps else sum(engine.facts.threads for engine in part.engines)
    cores = os.cpu_count() or 1
    if lines and at_once > cores:
        lines.append(
            f"{at_once} threads may work at once on {cores} cores, and slow each other down: lower "
            "runtime.threads or vllm.threads"
        )
    return elsewhere + lines + depends


def _depends(device: str, dtype: str, *, alone: bool) -> str:
    kind = f"{device}, {dtype.removeprefix('torch.')}"
    so = (
        "each is computed alone, so that runs repeat (rollout.repeatable: false is faster)"
        if alone
        else "two runs whose sessions have several turns are equal up to rounding only"
    )
    return f"logprobs depend in their last bits on what else is in the engine's batch ({kind}): {so}"


def make_engine(recipe: Recipe, model: PreTrainedModel, weights: Callable[[], tuple[Weights, int]]) -> Engine:
    """The engine that samples the student's answers, with its weights of now and their version.

    The torch engine samples with the model object itself. vLLM has weights of its own: those that `weights`
    gives (an adapter, if it takes it), now and whenever it wakes.
    """
    rollout = recipe.rollout
    if rollout.engine == "torch":
        return _torch_engine(recipe, model)
    context = rollout_context(recipe, context_length(model))
    threads, slots = torch.get_num_threads(), rollout.slots
    room = EngineSize("rollout", rollout.vllm, threads, context, slots, kv_tokens=slots * context)
    if takes_adapter(model):
        engine = engine_of_adapted(model, recipe.model.path, room, weights)
    else:
        engine = engine_of_model(model, room, weights)
    try:
        engine.load_weights(*weights())
    except BaseException:
        engine.close()
        raise
    return engine


def make_engines(
    recipe: Recipe, models: Iterable[PreTrainedModel], weights: Callable[[], tuple[Weights, int]]
) -> list[Engine]:
    """An engine for each copy of the student; torch engines of one process step in one order."""
    engines: list[Engine] = []
    try:
        for model in models:
            engines.append(make_engine(recipe, model, weights))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    share_order(engine.thread for engine in engines if isinstance(engine, TorchEngine))
    return engines


def start_engine_process(recipe: Recipe, threads: int) -> EngineProcess:
    """Begin to start a process with an engine for each copy of the weights that samples."""
    load = partial(_load_engines, recipe)
    # Before sessions are late: it is the engine that hangs then, not their loops.
    deadline_s = recipe.rollout.deadline_s / 2
    return EngineProcess(load, lag(recipe) + 1, threads=threads, deadline_s=deadline_s)


def _load_engines(recipe: Recipe) -> list[TorchEngine]:
    """Engines of the student as the run begins, each with its own copy of the weights."""
    model = load_model(recipe.model, recipe.seed)
    # Copies share what is frozen, the base of an adapter: so nothing else is frozen before them.
    copies = [model, *(copy_on_base(model) for _ in range(lag(recipe)))]
    return [_torch_engine(recipe, copy.requires_grad_(False)) for copy in copies]


def _torch_engine(recipe: Recipe, model: PreTrainedModel) -> TorchEngine:
    rollout, context = recipe.rollout, rollout_context(recipe, context_length(model))
    return TorchEngine(
        model,
        slots=rollout.slots,
        context=context,
        keep_tokens=rollout.keep_tokens,
        repeatable=rollout.repeatable,
    )
