"""What engines can't do, and settings that the chosen one does not read."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.rules import unread
from practicum.recipe.model_traits import model_traits
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import OwnPlacement, Teacher


def check_engines(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the student's engine and of those of its teachers."""
    yield from _student(recipe)
    here = {name: teacher for name, teacher in recipe.teachers.items() if teacher.url is None}
    for name, teacher in here.items():
        yield from _teacher(f"teachers.{name}", teacher)
    by_vllm = [name for name, teacher in here.items() if teacher.engine == "vllm"]
    if by_vllm and recipe.distill is not None and recipe.distill.signal == "full":
        advice = "vLLM gives no hidden states: set distill.signal to top_k or sampled, or its engine to torch"
        found = f"full with teachers.{by_vllm[0]}.engine vllm"
        yield RecipeError("distill.signal", found, "top_k or sampled", advice)
    if by_vllm and model_traits(recipe.model).vision:
        advice = "pictures are seen by the torch engine only"
        found = "vllm with a student that sees pictures"
        yield RecipeError(f"teachers.{by_vllm[0]}.engine", found, "torch", advice)


def _student(recipe: Recipe) -> Iterator[RecipeError]:
    rollout = recipe.rollout
    if rollout.engine == "torch":
        advice = "set rollout.engine: vllm, or remove it"
        yield from unread(rollout, "rollout", ("vllm",), "with rollout.engine torch", advice)
        return
    advice = "vLLM keeps the blocks of prompts that it has room for"
    yield from unread(rollout, "rollout", ("keep_tokens",), "with rollout.engine vllm", advice)
    traits = model_traits(recipe.model)
    if recipe.model.dtype == "float64":
        found = "float64 with rollout.engine vllm"
        yield RecipeError("model.dtype", found, "float32 or bfloat16, or rollout.engine: torch")
    if traits.vision:
        found, advice = "vllm with a model that sees pictures", "pictures are seen by the torch engine only"
        yield RecipeError("rollout.engine", found, "torch", advice)
    if traits.moe and recipe.train.replay_experts:
        advice = "vLLM does not tell which experts a token took: set it to false, or rollout.engine: torch"
        yield RecipeError("train.replay_experts", "true with rollout.engine vllm", "false", advice)


def _teacher(path: str, teacher: Teacher) -> Iterator[RecipeError]:
    if teacher.engine == "torch":
        advice = f"set {path}.engine: vllm, or remove it"
        yield from unread(teacher, path, ("vllm",), "with engine torch", advice)
        return
    advice = "vLLM finds its device by itself"
    yield from unread(teacher, path, ("device",), "with engine vllm", advice)
    if teacher.dtype == "float64":
        yield RecipeError(f"{path}.dtype", "float64 with engine vllm", "float32 or bfloat16")
    if isinstance(teacher.placement, OwnPlacement):
        own, advice = teacher.placement.own, f"{path}.vllm.threads and {path}.vllm.start_s are its own"
        where = f"{path}.placement.own"
        yield from unread(own, where, ("threads", "start_s"), "with engine vllm", advice)
