"""Save and find checkpoints of a run folder. Each is renamed when complete, so partial ones never appear."""

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
    """The small values that a resumed run needs."""

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
    window: dict[str, Any] = field(default_factory=dict)
    """Finished rows of later steps, and their sessions with rewards (rollout.lag)."""
    pending: dict[str, Any] = field(default_factory=dict)
    """Metrics and samples of this step that are not recorded yet because its evaluation failed."""


def is_checkpoint(path: Path) -> bool:
    return (path / "progress.json").is_file() and (path / "student").is_dir()


class Checkpoints:
    """The checkpoints of one run folder: save, find, prune."""

    def __init__(self, folder: Path, keep_last: int = 1) -> None:
        self.folder, self.keep_last = folder, keep_last

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def save(self, progress: Progress, write_parts: Callable[[Path], None]) -> Path:
        """Write a checkpoint of this step, then remove outdated ones."""
        final = self.path(progress.step)
        aside = self.folder / f"{ASIDE}{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            write_parts(aside)
            (aside / "progress.json").write_text(json.dumps(asdict(progress), indent=2))
            follow_umask(aside)
            for path in (*aside.rglob("*"), aside):
                _sync(path)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)  # the disk may be full
            raise
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)
        _sync(self.folder)
        for stale in self.folder.glob(f"{ASIDE}step-*"):
            shutil.rmtree(stale)
        for step in self.steps()[: -self.keep_last]:
            if step != progress.best_step:
                shutil.rmtree(self.path(step))
        link, aside = self.folder / "best", self.folder / f"{ASIDE}best"
        aside.unlink(missing_ok=True)
        if progress.best_step is None or not self.path(progress.best_step).is_dir():
            link.unlink(missing_ok=True)
        else:
            aside.symlink_to(self.path(progress.best_step).name)
            os.replace(aside, link)
        return final

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        paths = self.folder.glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in paths if is_checkpoint(path))

    def latest(self) -> tuple[Path, Progress]:
        if not (steps := self.steps()):
            raise PracticumError(f"{self.folder} has no checkpoint: start again with --fresh")
        path = self.path(steps[-1])
        return path, read_progress(path)


def read_progress(checkpoint: Path) -> Progress:
    try:
        return Progress(**json.loads((checkpoint / "progress.json").read_text()))
    except (ValueError, TypeError) as error:
        raise unreadable(checkpoint, error) from error


def unreadable(checkpoint: Path, error: Exception) -> PracticumError:
    return PracticumError(
        f"{checkpoint} can't be read: {type(error).__name__}: {error}\n"
        f"  → restore its files, or remove the folder to use the checkpoint before it"
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
