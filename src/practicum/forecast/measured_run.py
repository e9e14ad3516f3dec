"""What a finished run measured: the seconds of its stages and the lengths of its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from practicum.errors import PracticumError, RecipeErrors
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.problems import explain

WARM_UP = 2
"""First steps of a run that are left out: caches are cold, shapes are new."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Medians over the steps of a run. `seconds` has its stages and `step`, the whole of it.

    `idle` is the share of trained tokens that needed no backward pass: their advantages were all 0.
    """

    recipe: Recipe
    seconds: Mapping[str, float]
    response_tokens: float | None
    truncated: float
    idle: float
    steps: int


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder; a PracticumError if it holds none, or too few steps."""
    try:
        written = yamlfile.parse((folder / "recipe.yaml").read_text(), str(folder / "recipe.yaml")).data
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise PracticumError(
            f"--from {folder}: {error.strerror}: {error.filename}; expected the folder of a finished run"
        ) from None
    try:
        recipe = Recipe.model_validate(written)
    except ValidationError as error:
        raise RecipeErrors(str(folder / "recipe.yaml"), explain(error, {})) from None
    return summarise(recipe, rows, str(folder))


def summarise(recipe: Recipe, rows: Sequence[Mapping[str, float]], source: str = "the run") -> MeasuredRun:
    """The run of a recipe by its metrics, a mapping for each step."""
    steps = [row for row in rows if "time/step" in row]
    used = steps[WARM_UP:]
    if not used:
        raise PracticumError(
            f"{source} has {len(steps)} steps: a forecast needs more than {WARM_UP}, the first are left out"
        )
    timed = {name for row in used for name in row if name.startswith("time/") and name != "time/eval"}
    seconds = {name.removeprefix("time/"): _median(used, name) for name in timed}
    answers = any("rollout/response_tokens" in row for row in used)
    return MeasuredRun(
        recipe,
        seconds,
        _median(used, "rollout/response_tokens") if answers else None,
        _median(used, "rollout/truncated"),
        _median(used, "train/idle_tokens"),
        len(used),
    )


def _median(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return float(median(row.get(name, 0.0) for row in rows))
