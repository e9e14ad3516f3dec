"""The forecast of a run's step beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from practicum.errors import PracticumError
from practicum.forecast.cluster_spec import this_machine
from practicum.forecast.forecast import forecast
from practicum.forecast.workload import summarise
from practicum.recipe.schema.recipe import Recipe


def forecast_page(
    recipe: Mapping[str, Any], prompt_tokens: float, metrics: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Seconds of each stage as forecast for this machine, beside the medians of what was measured."""
    try:
        checked = Recipe.model_validate(recipe)
        measured = summarise(checked, metrics)
        found = forecast(checked, this_machine(), lambda _: prompt_tokens)
    except (PracticumError, ValidationError, OSError) as error:
        return {"sentence": f"No forecast: {str(error).splitlines()[0]}"}
    names = [*found.stages, *(name for name in measured.seconds if name not in found.stages)]
    stages = [
        {
            "name": name,
            "forecast": found.stages[name].seconds if name in found.stages else None,
            "measured": measured.seconds.get(name),
        }
        for name in names
        if name not in ("step", "checkpoint")
    ]
    return {"step": {"forecast": found.seconds, "measured": measured.seconds["step"]}, "stages": stages}
