"""Optional trackers beside the files of a run: TensorBoard, Weights & Biases, trackio, and the user's own."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from practicum.errors import MissingExtraError, RecipeError
from practicum.observe.text import markdown_table
from practicum.recipe.own_parts import GUIDE, PARTS, find_part, guarded
from practicum.recipe.schema.recipe import Recipe
from practicum.user_code import text_of, type_name

TABLE_ROWS = 64
"""Answers of a step that a tracker's table has; the files have all that were recorded."""
COLUMNS = (
    *("id", "task", "prompt", "response", "expected", "reward", "parts", "advantage"),
    *("response_tokens", "finish", "teacher", "failure"),
)
"""Keys of a recorded answer that are columns of such a table."""
_NUMBERS = ("reward", "advantage", "response_tokens")


@dataclass(frozen=True, slots=True)
class StepDetails:
    """What a step has in addition to numbers: recorded answers, and values of all its sessions."""

    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Lines of samples.jsonl and eval.jsonl, by `samples` and `eval`; none is empty."""
    distributions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Rewards, lengths and advantages of the sessions, by name; none is empty."""


class Tracker(Protocol):
    """Takes a step's metrics, and its answers and distributions."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_details(self, step: int, details: StepDetails) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_details(self, step: int, details: StepDetails) -> None:
        for name, values in details.distributions.items():
            self._writer.add_histogram(name, np.asarray(values), step)
        for name, answers in details.tables.items():
            self._writer.add_text(name, markdown_table(COLUMNS, table_rows(answers)), step)

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """A run of a project of wandb or trackio, whose interface is wandb's; a resumed run continues it, by the
    id in its folder. `module` is one of the two."""

    def __init__(self, module: str, recipe: Recipe, **options: Any) -> None:
        self._module: Any = importlib.import_module(module)
        config = recipe.model_dump(mode="json")
        self._run = self._module.init(config=config, resume="allow", **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_details(self, step: int, details: StepDetails) -> None:
        logged = {n: self._module.Histogram(list(v)) for n, v in details.distributions.items()}
        for name, answers in details.tables.items():
            logged[name] = self._module.Table(columns=list(COLUMNS), data=table_rows(answers))
        self._run.log(logged, step=step)

    def close(self) -> None:
        self._run.finish()


class WandB(_Hosted):
    """A run of a Weights & Biases project."""

    def __init__(self, project: str, recipe: Recipe, folder: Path) -> None:
        known_by = lasting_id(folder / "wandb.id")
        super().__init__("wandb", recipe, project=project, name=recipe.name, id=known_by, dir=str(folder))


class Trackio(_Hosted):
    """A run of a trackio project on this machine, which knows it by its name."""

    def __init__(self, project: str, recipe: Recipe, folder: Path) -> None:
        name = f"{recipe.name}-{lasting_id(folder / 'trackio.id')[:8]}"
        super().__init__("trackio", recipe, project=project, name=name, embed=False)


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

    def log_details(self, step: int, details: StepDetails) -> None:
        """For a tracker that has it: answers and distributions."""
        if callable(log := getattr(self._tracker, "log_details", None)):
            guarded(log, self._what)(step, details)

    def close(self) -> None:
        guarded(self._tracker.close, self._what)()


def table_rows(answers: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The first answers as rows of `COLUMNS`; a column holds numbers or texts, never both."""
    return [[_cell(name, answer.get(name)) for name in COLUMNS] for answer in answers[:TABLE_ROWS]]


def _cell(name: str, value: Any) -> float | str | None:
    if value is None or name in _NUMBERS:
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {number}" for part, number in value.items())
    return text_of(value)


def lasting_id(file: Path) -> str:
    """The id in this file, which a tracker knows the run by; a new one if there is none."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()


def require_trackers(recipe: Recipe) -> None:
    """The trackers that the recipe asks for are installed, or a MissingExtraError names the extra."""
    track = recipe.track
    switches = {"tensorboard": track.tensorboard, "wandb": track.wandb, "trackio": track.trackio}
    for name in (name for name, is_on in switches.items() if is_on):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(f"track.{name}", name) from error


def make_trackers(recipe: Recipe, folder: Path) -> list[Tracker]:
    """Those that the recipe asks for."""
    track, trackers = recipe.track, list[Tracker]()
    if track.tensorboard:
        trackers.append(TensorBoard(folder))
    if track.wandb:
        trackers.append(WandB(track.wandb, recipe, folder))
    if track.trackio:
        trackers.append(Trackio(track.trackio, recipe, folder))
    trackers += [OwnTracker(use, recipe, folder) for use in track.own]
    return trackers
