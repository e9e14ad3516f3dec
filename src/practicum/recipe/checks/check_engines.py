"""Check engines against the models they run, and the devices they need against the cluster's."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.devices import names_one_of_several
from practicum.errors import RecipeError
from practicum.recipe.derived import folder_config, model_traits
from practicum.recipe.schema.engine_sections import EngineChoice, Heads
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.runtime_section import Pool


def check_engines(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the engines that sample and score."""
    rollout, model, teachers = recipe.rollout, recipe.model, recipe.teachers
    traits, make = model_traits(model), model.random_init
    student_heads = _folder_heads(model.path) if make is None else (make.heads, make.kv_heads)
    yield from _computes("rollout", rollout, "model.dtype", model.dtype, traits.vision, student_heads)
    if recipe.on_ray and rollout.engine_devices > 1:
        yield from _several_devices(rollout, recipe.pools.rollout)
    for name, teacher in teachers.items():
        if teacher.url is not None:
            continue
        path, on_student = f"teachers.{name}", teacher.adapter is not None and teacher.model is None
        dtype_key, dtype = ("model", model.dtype) if on_student else (path, teacher.dtype)
        heads = student_heads if teacher.model is None else _folder_heads(teacher.model)
        yield from _computes(path, teacher, f"{dtype_key}.dtype", dtype, traits.vision, heads)
        engine, able = teacher.engine, teacher.engine_traits
        if teacher.student is not None and model.lora is not None and not able.scores_student_adapter:
            found = f"{engine} with a copy of a student that has an adapter"
            yield RecipeError(f"{path}.engine", found, "another engine")
        if recipe.distill is not None and recipe.distill.signal == "full" and not able.hidden_states:
            advice = (
                "it returns no hidden states: set distill.signal to top_k or sampled, or use another engine"
            )
            found = f"full with {path}.engine {engine}"
            yield RecipeError("distill.signal", found, "top_k or sampled", advice)
        if recipe.on_ray and teacher.engine_devices > 1 and not teacher.scores_during_rollout:
            found = f"{teacher.engine_devices} with placement {teacher.placement_name} and runtime.kind ray"
            advice = f"the learner's process has one device: set {path}.placement to own"
            yield RecipeError(f"{path}.{teacher.devices_key}", found, "1, or placement: own", advice)


def _computes(
    path: str, choice: EngineChoice, dtype_key: str, dtype: str, sees: bool, heads: Heads | None
) -> Iterator[RecipeError]:
    if dtype not in choice.engine_traits.dtypes:
        found = f"{dtype} with {path}.engine {choice.engine}"
        yield RecipeError(dtype_key, found, f"{' or '.join(choice.engine_traits.dtypes)}, or another engine")
    if sees and not choice.engine_traits.vision:
        found = f"{choice.engine} with a student that takes images"
        yield RecipeError(f"{path}.engine", found, "an engine that takes images, such as torch")
    yield from choice.engine_problems(path, heads)


def _several_devices(choice: EngineChoice, pool: Pool | None) -> Iterator[RecipeError]:
    """Check that an engine on several devices has a pool for itself, on one machine."""
    devices, key = choice.engine_devices, f"rollout.{choice.devices_key}"
    if pool is None:
        advice = f"engines share the learner's devices, one each: add pools.rollout: {{devices: {devices}}}"
        yield RecipeError(key, f"{devices} without pools.rollout", "1, or a separate pool", advice)
    elif pool.devices % devices:
        found = f"{devices} with {pool.devices} devices on each node of pools.rollout"
        yield RecipeError(key, found, "a number that divides them, because an engine runs on one machine")


def _folder_heads(path: str | None) -> Heads | None:
    """Return the numbers of attention heads and KV heads, or None for a model that is not on this disk."""
    config = folder_config(path)
    text = config.get("text_config") or config
    queries = text.get("num_attention_heads")
    return (queries, text.get("num_key_value_heads") or queries) if isinstance(queries, int) else None


def check_runtime(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the cluster's pools and of the optimizer's placement."""
    train, ranks = recipe.train, recipe.data_parallel
    if train.optimizer == "adamw_8bit" and ranks > 1:
        found = f"adamw_8bit with {ranks} data-parallel ranks (pools.train)"
        advice = (
            "shards of ranks would split its blocks of 256 values: use one rank, or adamw with train.offload"
        )
        yield RecipeError("train.optimizer", found, "adamw", advice)
    if train.optimizer == "adamw_8bit" and recipe.model.dtype == "float64":
        yield RecipeError("train.optimizer", "adamw_8bit with model.dtype float64", "adamw")
    if train.offload == "host" and recipe.model.device == "cpu":
        found = "host with model.device cpu, whose memory is the host's"
        yield RecipeError("train.offload", found, "none")
    if not recipe.on_ray:
        return  # keys of a cluster may stay in local runs
    devices = {"model": recipe.model.device}
    devices |= {path: model.device for path, model in recipe.own_models.items()}
    for path, device in devices.items():
        if names_one_of_several(device):
            found, advice = f"{device} with runtime.kind ray", "Ray chooses which GPU a process gets"
            yield RecipeError(f"{path}.device", found, f"auto, cpu or {device.partition(':')[0]}", advice)
    pool, lag = recipe.pools.rollout, recipe.rollout.lag
    if pool is None and lag:
        advice = "engines can't share the learner's devices while it works: add rollout: {devices: 1}"
        yield RecipeError("pools.rollout", f"none with rollout.lag {lag}", "a pool of devices", advice)
