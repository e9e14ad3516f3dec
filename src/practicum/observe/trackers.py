"""Optional trackers beside the files of a run: TensorBoard, Weights & Biases, trackio, and the user's own."""

from __future__ import annotations

import html
import importlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from practicum.errors import MissingExtraError, RecipeError
from practicum.observe.text import plain
from practicum.recipe.own_parts import GUIDE, PARTS, find_part, guarded
from practicum.recipe.schema.recipe import Recipe

DEFAULT_PROJECT = "practicum"
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
    """Recorded answers of a step, and values of all its sessions."""

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
            rows = [COLUMNS, ["---"] * len(COLUMNS), *([*map(_markdown, row)] for row in table_rows(answers))]
            self._writer.add_text(name, "\n".join(f"| {' | '.join(row)} |" for row in rows), step)

    def close(self) -> None:
        self._writer.close()


class HostedTracker:
    """A run of a project of wandb, or of trackio, whose interface is wandb's."""

    def __init__(self, module: str, config: Mapping[str, Any], **options: Any) -> None:
        self._module: Any = importlib.import_module(module)
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


class OwnTracker:
    """A tracker of the user's, whose errors say where it raised."""

    def __init__(self, use: str, tracker: Any) -> None:
        self._what, self._tracker = f"track.to: {use}", tracker
        for name in ("log", "close"):
            if not callable(getattr(tracker, name, None)):
                found = f"{use!r}, which made an object of type {type(tracker).__name__} without {name}"
                raise RecipeError("track.to", found, PARTS["tracker"].expected, GUIDE)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        guarded(self._tracker.log, self._what)(step, metrics)

    def log_details(self, step: int, details: StepDetails) -> None:
        if callable(log := getattr(self._tracker, "log_details", None)):
            guarded(log, self._what)(step, details)

    def close(self) -> None:
        guarded(self._tracker.close, self._what)()


def table_rows(answers: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the first answers as rows of `COLUMNS`. A column holds numbers or texts, never both."""
    return [[_cell(name, answer.get(name)) for name in COLUMNS] for answer in answers[:TABLE_ROWS]]


def _cell(name: str, value: Any) -> float | str | None:
    if value is None or name in _NUMBERS:
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {number}" for part, number in value.items())
    return str(value)


def _markdown(cell: float | str | None) -> str:
    """Return a cell that shows texts as they are: nothing in them is Markdown or HTML."""
    if isinstance(cell, float):
        return f"{cell:.4g}"
    text = "" if cell is None else html.escape(plain(str(cell)), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|])", r"\\\1", text)


def require_trackers(names: Sequence[str]) -> None:
    """Raise a MissingExtraError for a tracker of `track.to` whose library is not installed."""
    for name in names:
        library = name.partition("/")[0]
        if library in TRACKERS:
            try:
                importlib.import_module(library)
            except ImportError as error:
                raise MissingExtraError("track.to", library) from error


def make_trackers(recipe: Recipe, folder: Path) -> list[Tracker]:
    """Return the trackers of `track.to`. A resumed run continues theirs, by the id in its folder."""
    trackers: list[Tracker] = []
    for name in recipe.track.to:
        library, _, project = name.partition("/")
        if library in TRACKERS:
            config = recipe.model_dump(mode="json")
            trackers.append(TRACKERS[library](project or DEFAULT_PROJECT, config, folder))
        else:
            trackers.append(OwnTracker(name, find_part("tracker", name)(recipe, folder)))
    return trackers


def _hosted(library: str, project: str, config: Mapping[str, Any], folder: Path) -> Tracker:
    file, options = folder / f"{library}.id", dict[str, Any]()
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    run_id = file.read_text()
    if library == "wandb":
        options |= {"name": config["name"], "id": run_id, "dir": str(folder)}
    else:  # trackio knows a run by its name
        options |= {"name": f"{config['name']}-{run_id[:8]}", "embed": False}
    return HostedTracker(library, config, project=project, **options)


TRACKERS: dict[str, Callable[[str, Mapping[str, Any], Path], Tracker]] = {
    "tensorboard": lambda project, config, folder: TensorBoard(folder),
    "wandb": partial(_hosted, "wandb"),
    "trackio": partial(_hosted, "trackio"),
}
"""Libraries of `track.to`: each makes the tracker of a project, a resolved recipe and a run folder."""
