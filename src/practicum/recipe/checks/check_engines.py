"""Models that an engine can't compute, by the traits of `schema.engine_sections.ENGINES`."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.derived import folder_config, model_traits
from practicum.recipe.schema.engine_sections import EngineChoice, Heads
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.recipe.schema.runtime_section import Pool


def check_engines(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the engines that sample and score."""
    rollout, model, teachers = recipe.rollout, recipe.model, recipe.teachers
    traits, student_heads = model_traits(model), _heads(model)
    yield from _computes("rollout", rollout, "model.dtype", model.dtype, traits.vision)
    yield from _settings("rollout", rollout, student_heads)
    if recipe.on_ray and rollout.engine_devices > 1:
        yield from _several_devices(rollout, rollout.replicas, recipe.pools.rollout)
    for name, teacher in teachers.items():
        if teacher.url is not None:
            continue
        path, on_student = f"teachers.{name}", teacher.adapter is not None and teacher.model is None
        dtype_key, dtype = ("model", model.dtype) if on_student else (path, teacher.dtype)
        yield from _computes(path, teacher, f"{dtype_key}.dtype", dtype, traits.vision)
        yield from _settings(
            path, teacher, student_heads if teacher.model is None else _folder_heads(teacher.model)
        )
        engine, able = teacher.engine, teacher.engine_traits
        if teacher.student is not None and model.lora is not None and not able.scores_student_adapter:
            found = f"{engine} with a copy of a student that has an adapter"
            yield RecipeError(f"{path}.engine", found, "another engine")
        if recipe.distill is not None and recipe.distill.signal == "full" and not able.hidden_states:
            advice = "it returns no hidden states: set distill.signal to top_k or sampled, or another engine"
            found = f"full with {path}.engine {engine}"
            yield RecipeError("distill.signal", found, "top_k or sampled", advice)
        if recipe.on_ray and teacher.engine_devices > 1 and not teacher.scores_during_rollout:
            found = f"{teacher.engine_devices} with placement {teacher.placement_name} and runtime.kind ray"
            advice = f"the learner's process has one device: set {path}.placement to own"
            yield RecipeError(f"{path}.{teacher.devices_key}", found, "1, or placement: own", advice)


def _computes(
    path: str, choice: EngineChoice, dtype_key: str, dtype: str, sees: bool
) -> Iterator[RecipeError]:
    if dtype not in choice.engine_traits.dtypes:
        found = f"{dtype} with {path}.engine {choice.engine}"
        yield RecipeError(dtype_key, found, f"{' or '.join(choice.engine_traits.dtypes)}, or another engine")
    if sees and not choice.engine_traits.vision:
        found = f"{choice.engine} with a student that takes images"
        yield RecipeError(f"{path}.engine", found, "an engine that takes images, such as torch")


def _settings(path: str, choice: EngineChoice, heads: Heads | None) -> Iterator[RecipeError]:
    if choice.engine_settings is not None:
        yield from choice.engine_settings.problems(f"{path}.{choice.engine}", heads)


def _several_devices(choice: EngineChoice, replicas: int | None, pool: Pool | None) -> Iterator[RecipeError]:
    """An engine of several devices has them for itself, on one machine."""
    devices, key = choice.engine_devices, f"rollout.{choice.devices_key}"
    if pool is None:
        advice = f"engines share the learner's devices, one each: add pools.rollout: {{devices: {devices}}}"
        yield RecipeError(key, f"{devices} without pools.rollout", "1, or a separate pool", advice)
    elif pool.devices % devices:
        found = f"{devices} with {pool.devices} devices on each node of pools.rollout"
        yield RecipeError(key, found, "a number that divides them: an engine is on one machine")
    elif replicas not in (None, pool.total // devices):
        found = f"{replicas} engines of {devices} devices"
        expected = f"{pool.total // devices}, as many as fit pools.rollout"
        yield RecipeError("rollout.replicas", found, expected, "remove it, or change pools.rollout")


def _heads(model: Model) -> Heads | None:
    """Attention heads and KV heads; None if they are not known yet."""
    make = model.make
    return _folder_heads(model.path) if make is None else (make.heads, make.kv_heads)


def _folder_heads(path: str | None) -> Heads | None:
    config = folder_config(path)
    text = config.get("text_config") or config
    queries = text.get("num_attention_heads")
    return (queries, text.get("num_key_value_heads") or queries) if isinstance(queries, int) else None
