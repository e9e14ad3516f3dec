"""The student's engine, by the kind that the recipe names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.models.load import context_length
from practicum.recipe.schema import Recipe
from practicum.rollout.protocol import Engine
from practicum.rollout.torch_engine import TorchEngine
from practicum.rollout.vllm.engine import VllmEngine
from practicum.teachers.place import Place
from practicum.teachers.vllm import VllmTeacher

Weights = Iterable[tuple[str, Tensor]]


def rollout_context(recipe: Recipe, model_context: int | None) -> int:
    """Tokens of KV memory for one sequence: the recipe's, else 1,024 of prompt and the answer."""
    if recipe.rollout.context is not None:
        return recipe.rollout.context
    needed = 1024 + recipe.rollout.max_new_tokens
    return needed if model_context is None else min(needed, model_context)


def describe_engines(*parts: Engine | Place) -> list[str]:
    """Of those that are vLLM's, and a warning if they have more threads than the machine has cores."""
    told: list[str] = []
    at_once = torch.get_num_threads()
    for part in parts:
        if isinstance(part, VllmEngine):
            told.append(part.describe())
        elif isinstance(part, VllmTeacher):
            told += part.describe()
            at_once += 0 if part.sleeps else sum(engine.facts.threads for engine in part.engines)
    cores = os.cpu_count() or 1
    if told and at_once > cores:
        told.append(
            f"{at_once} threads may work at once on {cores} cores, and slow each other down: lower "
            "runtime.threads or vllm.threads"
        )
    return told


def make_engine(recipe: Recipe, model: PreTrainedModel, weights: Callable[[], tuple[Weights, int]]) -> Engine:
    """The engine that samples the student's answers, with its weights of now and their version.

    The torch engine samples with the model object itself. vLLM has weights of its own: those that `weights`
    gives, now and whenever it wakes.
    """
    rollout = recipe.rollout
    context = rollout_context(recipe, context_length(model))
    if rollout.engine == "torch":
        return TorchEngine(model, slots=rollout.slots, context=context, keep_tokens=rollout.keep_tokens)
    from practicum.rollout.vllm.make import Room, engine_of_model

    room = Room(context, rollout.slots, kv_tokens=rollout.slots * context)
    threads = torch.get_num_threads()
    engine = engine_of_model("rollout", model, rollout.vllm, room, weights, threads=threads)
    try:
        engine.load_weights(*weights())
    except BaseException:
        engine.close()
        raise
    return engine
