"""The forecast of a run's step beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from practicum.errors import PracticumError
from practicum.forecast.cluster_spec import this_machine
from practicum.forecast.forecast import forecast
from practicum.forecast.workload import summarise
from practicum.recipe.schema.recipe import Recipe


def forecast_page(
    recipe: Mapping[str, Any],
    prompt_tokens: float,
    metrics: Sequence[Mapping[str, float]],
    directory: Path,
) -> dict[str, Any]:
    """Seconds of each stage as forecast for this machine, beside the medians of what was measured.

    `directory` is where the run was started: relative paths of models begin there.
    """
    try:
        checked = Recipe.model_validate(_with_places(recipe, directory))
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


def _with_places(recipe: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The recipe with its models named from anywhere."""

    def place(section: Any, key: str) -> Any:
        path = section.get(key) if isinstance(section, dict) else None
        if not isinstance(path, str) or not (directory / path).exists():
            return section
        return section | {key: str(directory / path)}

    placed = {**recipe, "model": place(recipe.get("model"), "path")}
    if isinstance(teachers := recipe.get("teachers"), dict):
        placed["teachers"] = {n: place(place(one, "model"), "adapter") for n, one in teachers.items()}
    return placed
