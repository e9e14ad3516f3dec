"""The memory that `practicum plan` counts for a run in this process."""

from __future__ import annotations

from practicum.devices import memory_of, pick_device
from practicum.errors import PracticumError
from practicum.forecast.cluster_spec import GIB, this_machine
from practicum.forecast.forecast import forecast
from practicum.recipe.derived import on_ray
from practicum.recipe.schema.recipe import Recipe


def planned_memory(recipe: Recipe, prompt_tokens: float = 1024.0) -> float | None:
    """Bytes at most, with prompts of this many tokens; None on Ray, or if the model's sizes are not known."""
    if on_ray(recipe):
        return None
    try:
        device = pick_device(recipe.model.device)
        size = None if device.type == "cpu" else memory_of(device)
        machine = this_machine(None if size is None else size / GIB)
        (memory,) = forecast(recipe, machine, lambda _: prompt_tokens).memory
    except PracticumError:
        return None
    return memory.total
