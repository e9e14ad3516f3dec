"""Settings of vLLM engines that can't work: over several devices, and options that have their own key."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.derived import folder_config
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.rollout_sections import Vllm

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def check_vllm(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the sections that are read."""
    if recipe.rollout.engine == "vllm":
        yield from _section("rollout.vllm", recipe.rollout.vllm, _student_heads(recipe))
        yield from _on_ray(recipe)
    for name, teacher in recipe.teachers.items():
        if teacher.url is None and teacher.engine == "vllm":
            path = f"teachers.{name}"
            heads = _student_heads(recipe) if teacher.model is None else _folder_heads(teacher.model)
            yield from _section(f"{path}.vllm", teacher.vllm, heads)
            parallel = teacher.vllm.tensor_parallel
            if recipe.on_ray and parallel > 1 and teacher.placement_name == "colocated":
                found = f"{parallel} with placement colocated and runtime.kind ray"
                advice = f"a colocated teacher has the learner's one device: set {path}.placement to own"
                yield RecipeError(f"{path}.vllm.tensor_parallel", found, "1, or placement: own", advice)


def _section(path: str, vllm: Vllm, heads: tuple[int, int] | None) -> Iterator[RecipeError]:
    for name in _PARALLEL:
        if name in vllm.options:
            advice = f"set {path}.tensor_parallel; vLLM's other kinds of parallelism are not supported"
            yield RecipeError(f"{path}.options", name, "options of another kind", advice)
    parallel = vllm.tensor_parallel
    if heads is None or parallel == 1:
        return
    queries, keys = heads
    if queries % parallel or (keys % parallel and parallel % keys):
        found = f"{parallel} with {queries} attention heads and {keys} KV heads"
        expected = "a number that divides the heads, and divides the KV heads or is a multiple of them"
        yield RecipeError(f"{path}.tensor_parallel", found, expected)


def _on_ray(recipe: Recipe) -> Iterator[RecipeError]:
    """An engine of several devices has them for itself, on one machine."""
    parallel, pool = recipe.rollout.vllm.tensor_parallel, recipe.pools.rollout
    if parallel == 1 or not recipe.on_ray:
        return
    key = "rollout.vllm.tensor_parallel"
    if pool is None:
        advice = f"engines share the learner's devices, one each: add pools.rollout: {{devices: {parallel}}}"
        yield RecipeError(key, f"{parallel} without pools.rollout", "1, or a pool of their own", advice)
    elif pool.devices % parallel:
        found = f"{parallel} with {pool.devices} devices on each node of pools.rollout"
        yield RecipeError(key, found, "a number that divides the devices: an engine is on one machine")
    elif recipe.rollout.replicas not in (None, pool.nodes * pool.devices // parallel):
        found = f"{recipe.rollout.replicas} engines of {parallel} devices"
        expected = f"{pool.nodes * pool.devices // parallel}, as many as fit pools.rollout"
        yield RecipeError("rollout.replicas", found, expected, "remove it, or change pools.rollout")


def _student_heads(recipe: Recipe) -> tuple[int, int] | None:
    """Attention heads and KV heads; None if they are not known yet."""
    make = recipe.model.make
    return _folder_heads(recipe.model.path) if make is None else (make.heads, make.kv_heads)


def _folder_heads(path: str | None) -> tuple[int, int] | None:
    config = folder_config(path)
    text = config.get("text_config") or config
    queries = text.get("num_attention_heads")
    return (queries, text.get("num_key_value_heads") or queries) if isinstance(queries, int) else None
