"""Checkpoints: written aside, then renamed, so that one is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from practicum.errors import PracticumError
from practicum.trainer.run_folder import follow_umask

ASIDE = ".writing-"


@dataclass(slots=True)
class Progress:
    """Where a run is: everything small that a resumed run needs."""

    step: int = 0
    version: int = 0
    stream: dict[str, int] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    first_eval: dict[str, float] = field(default_factory=dict)
    last_eval: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    pending: dict[str, Any] = field(default_factory=dict)
    """Metrics and samples of this step, if they are yet to be recorded: its evaluation failed."""


def step_name(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step-{step:06d}"


def is_checkpoint(path: Path) -> bool:
    """Whether a whole checkpoint is here."""
    return (path / "progress.json").is_file() and (path / "student").is_dir()


class Checkpoints:
    """The checkpoints of one run folder: save, find, prune."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def save(self, progress: Progress, write_parts: Callable[[Path], None]) -> Path:
        """Write a checkpoint of this step, then drop those no longer kept."""
        final = self.folder / step_name(progress.step)
        aside = self.folder / f"{ASIDE}{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write_parts(aside)
        (aside / "progress.json").write_text(json.dumps(asdict(progress), indent=2))
        follow_umask(aside)
        _sync_tree(aside)
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)
        _sync(self.folder)
        self._prune(progress.best_step)
        self._point_to_best(progress.best_step)
        return final

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))

    def latest(self) -> tuple[Path, Progress]:
        """The newest checkpoint."""
        steps = self.steps()
        if not steps:
            raise PracticumError(
                f"{self.folder} has no checkpoint to resume from yet: start again with --fresh"
            )
        path = self.folder / step_name(steps[-1])
        return path, Progress(**json.loads((path / "progress.json").read_text()))

    def _prune(self, best_step: int | None) -> None:
        for stale in self.folder.glob(f"{ASIDE}step-*"):
            shutil.rmtree(stale)
        steps = self.steps()
        for step in steps[: -self.keep_last]:
            if step != best_step:
                shutil.rmtree(self.folder / step_name(step))

    def _point_to_best(self, step: int | None) -> None:
        """`best` is a link to the best checkpoint, if there is one."""
        link, aside = self.folder / "best", self.folder / f"{ASIDE}best"
        if step is None or not (self.folder / step_name(step)).is_dir():
            link.unlink(missing_ok=True)
            return
        aside.unlink(missing_ok=True)
        aside.symlink_to(step_name(step))
        os.replace(aside, link)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
