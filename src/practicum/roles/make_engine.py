"""The student's engine, by the kind that the recipe names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.devices import describe_device
from practicum.engines.protocol import Engine
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.make_vllm import EngineSize, engine_of_adapted, engine_of_model, takes_adapter
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.models.load_model import context_length
from practicum.places.place import TeacherPlace
from practicum.places.vllm_teacher import VllmTeacher
from practicum.recipe.derived import rollout_context
from practicum.recipe.schema.recipe import Recipe

Weights = Iterable[tuple[str, Tensor]]


def describe_engines(*parts: Engine | TeacherPlace) -> list[str]:
    """What there is to say of vLLM's, and of devices other than the CPU; and warnings: of more threads than
    the machine has cores, and of a torch engine whose numbers depend on its batch."""
    lines: list[str] = []
    elsewhere: list[str] = []
    depends: list[str] = []
    at_once = torch.get_num_threads()
    for part in parts:
        if isinstance(part, TorchEngine) and part.runner.device.type != "cpu":
            elsewhere.append(describe_device(part.runner.device))
        if isinstance(part, TorchEngine) and not part.runner.invariant:
            kind = f"{part.runner.device.type}, {str(part.runner.model.dtype).removeprefix('torch.')}"
            so = (
                "each is computed alone, so that runs repeat (rollout.repeatable: false is faster)"
                if part.alone
                else "two runs whose sessions have several turns are equal up to rounding only"
            )
            depends.append(
                f"logprobs depend in their last bits on what else is in the engine's batch ({kind}): {so}"
            )
        elif isinstance(part, VllmEngine):
            lines.append(part.describe())
        elif isinstance(part, VllmTeacher):
            lines += part.describe()
            at_once += 0 if part.sleeps else sum(engine.facts.threads for engine in part.engines)
    cores = os.cpu_count() or 1
    if lines and at_once > cores:
        lines.append(
            f"{at_once} threads may work at once on {cores} cores, and slow each other down: lower "
            "runtime.threads or vllm.threads"
        )
    return elsewhere + lines + depends


def make_engine(recipe: Recipe, model: PreTrainedModel, weights: Callable[[], tuple[Weights, int]]) -> Engine:
    """The engine that samples the student's answers, with its weights of now and their version.

    The torch engine samples with the model object itself. vLLM has weights of its own: those that `weights`
    gives (an adapter, if it takes it), now and whenever it wakes.
    """
    rollout = recipe.rollout
    context = rollout_context(recipe, context_length(model))
    if rollout.engine == "torch":
        return TorchEngine(
            model,
            slots=rollout.slots,
            context=context,
            keep_tokens=rollout.keep_tokens,
            repeatable=rollout.repeatable,
        )
    room = EngineSize(context, rollout.slots, kv_tokens=rollout.slots * context)
    threads = torch.get_num_threads()
    if takes_adapter(model):
        path, options = recipe.model.path, rollout.vllm
        engine = engine_of_adapted("rollout", model, path, options, room, weights, threads=threads)
    else:
        engine = engine_of_model("rollout", model, rollout.vllm, room, weights, threads=threads)
    try:
        engine.load_weights(*weights())
    except BaseException:
        engine.close()
        raise
    return engine
