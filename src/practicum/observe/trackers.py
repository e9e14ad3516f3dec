"""Optional trackers beside metrics.jsonl: TensorBoard, Weights & Biases, and the user's own."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from practicum.errors import MissingExtraError, RecipeError
from practicum.recipe.own_parts import GUIDE, PARTS, find_part, guarded
from practicum.recipe.schema.recipe import Recipe
from practicum.user_code import type_name


class Tracker(Protocol):
    """Takes a step's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of a Weights & Biases project; a resumed run continues it, by the id in its folder."""

    def __init__(self, project: str, recipe: Recipe, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        config: dict[str, Any] = recipe.model_dump(mode="json")
        id_file = folder / "wandb.id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=project,
            name=recipe.name,
            id=id_file.read_text(),
            dir=str(folder),
            config=config,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class OwnTracker:
    """A tracker of the user's, whose errors say where it raised."""

    def __init__(self, use: str, recipe: Recipe, folder: Path) -> None:
        self._what = f"track.own: {use}"
        self._tracker: Any = find_part("tracker", use)(recipe, folder)
        for name in ("log", "close"):
            if not callable(getattr(self._tracker, name, None)):
                found = f"{use!r}, which made an object of type {type_name(self._tracker)} without {name}"
                raise RecipeError("track.own", found, PARTS["tracker"].expected, GUIDE)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        guarded(self._tracker.log, self._what)(step, metrics)

    def close(self) -> None:
        guarded(self._tracker.close, self._what)()


def require_trackers(recipe: Recipe) -> None:
    """The trackers that the recipe asks for are installed, or a MissingExtraError names the extra."""
    for name, wanted in (("tensorboard", recipe.track.tensorboard), ("wandb", recipe.track.wandb)):
        try:
            if wanted:
                importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(f"track.{name}", name) from error


def make_trackers(recipe: Recipe, folder: Path) -> list[Tracker]:
    """Those that the recipe asks for."""
    trackers: list[Tracker] = []
    if recipe.track.tensorboard:
        trackers.append(TensorBoard(folder))
    if recipe.track.wandb:
        trackers.append(WandB(recipe.track.wandb, recipe, folder))
    trackers += [OwnTracker(use, recipe, folder) for use in recipe.track.own]
    return trackers
