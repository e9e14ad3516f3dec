"""A run that has ended, as Python code sees it: what it reached, and what its folder holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.recipe.schema.recipe import Recipe
from practicum.records.json_files import read_rows
from practicum.trainer.run_folder import RunFolder
from practicum.trainer.run_models import model_folder


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run that has ended: its scores, and what is in its folder."""

    recipe: Recipe
    """As resolved: every value that the run went by."""
    folder: Path
    first_eval: dict[str, float]
    """Scores of the evaluation before training; empty without one."""
    last_eval: dict[str, float]
    steps: int
    seconds: float
    failures: tuple[str, ...] = ()
    """Sessions that failed, counted by reason, in sentences."""
    warnings: tuple[str, ...] = ()
    """Why it may have learnt nothing, in sentences."""
    signal: int | None = None
    """What stopped it before its end: SIGINT or SIGTERM."""

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped before its end; --resume continues it."""
        return self.signal is not None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: one per step, row 0 is the evaluation before training."""
        return list(RunFolder(self.folder).metrics())

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl: answers as text, with their rewards."""
        return read_rows(self.folder / "samples.jsonl")

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have a metric and its values, as plot functions take them."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    @property
    def model(self) -> Path:
        """Its model in HuggingFace format; of a stopped run that of its newest checkpoint, written here."""
        return Path(model_folder(str(self.folder)))

    @property
    def best(self) -> Path | None:
        """The best checkpoint by the evaluations, a model wherever practicum takes one; None if not kept."""
        path = self.folder / "checkpoints" / "best"
        return path.resolve() if path.exists() else None

    def __repr__(self) -> str:
        state = "stopped" if self.interrupted else "done"
        return f"<Run {self.name}: {state}, {self.steps} steps, {self.folder}>"
