"""Checkpoints: written aside, then renamed, so that one is there whole or not at all.

Each has the checksums of its files: one whose bytes have changed since is passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from practicum.errors import PracticumError
from practicum.trainer.run_folder import follow_umask

ASIDE, DAMAGED = ".writing-", "damaged-"
_SUMS = "checksums.json"


@dataclass(slots=True)
class Progress:
    """Where a run is: everything small that a resumed run needs."""

    step: int = 0
    version: int = 0
    stream: dict[str, int] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    record_sums: dict[str, int] = field(default_factory=dict)
    """Checksums of the records up to these positions."""
    first_eval: dict[str, float] = field(default_factory=dict)
    last_eval: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    seconds: float = 0.0
    window: dict[str, Any] = field(default_factory=dict)
    """Rows of later steps whose sessions are done, and sessions that have their reward (async.lag)."""
    pending: dict[str, Any] = field(default_factory=dict)
    """Metrics and samples of this step, if they are yet to be recorded: its evaluation failed."""


def step_name(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step-{step:06d}"


def is_checkpoint(path: Path) -> bool:
    """Whether a whole checkpoint is here."""
    return (path / "progress.json").is_file() and (path / "student").is_dir()


class Latest(NamedTuple):
    """The newest checkpoint that can be used, and why newer ones can't, by their steps."""

    path: Path
    progress: Progress
    passed_over: dict[int, str]


class Checkpoints:
    """The checkpoints of one run folder: save, find, prune."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder, self.keep_last = folder, keep_last

    def save(self, progress: Progress, write_parts: Callable[[Path], None]) -> Path:
        """Write a checkpoint of this step, then drop those no longer kept."""
        final = self.folder / step_name(progress.step)
        aside = self.folder / f"{ASIDE}{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            write_parts(aside)
            (aside / "progress.json").write_text(json.dumps(asdict(progress), indent=2))
            (aside / _SUMS).write_text(json.dumps(_sums(aside), indent=1))
            follow_umask(aside)
            _sync_tree(aside)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)  # what made it fail may be a full disk
            raise
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
        whole = (path.name for path in self.folder.iterdir() if is_checkpoint(path))
        return sorted(int(name.removeprefix("step-")) for name in whole if name.startswith("step-"))

    def latest(self, records: Callable[[Progress], str | None] = lambda progress: None) -> Latest:
        """The newest checkpoint whose files are as they were written.

        `records` says what is wrong with the run's records as of a checkpoint, if something is.
        """
        steps = self.steps()
        if not steps:
            raise PracticumError(
                f"{self.folder} has no checkpoint to resume from yet: start again with --fresh"
            )
        passed_over: dict[int, str] = {}
        for step in reversed(steps):
            path = self.folder / step_name(step)
            damage = find_damage(path)
            if damage is None:
                progress = Progress(**json.loads((path / "progress.json").read_text()))
                damage = records(progress)
                if damage is None:
                    return Latest(path, progress, passed_over)
            passed_over[step] = damage
        raise PracticumError(
            "\n".join(
                [
                    f"{self.folder} has no checkpoint that can be resumed from:",
                    *(f"  {step_name(step)}: {damage}" for step, damage in passed_over.items()),
                    "  → restore the files from a copy, or start again with --fresh",
                ]
            )
        )

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that nothing takes it for a whole one."""
        kept = self.folder / f"{DAMAGED}{step_name(step)}"
        shutil.rmtree(kept, ignore_errors=True)
        os.replace(self.folder / step_name(step), kept)

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


def find_damage(checkpoint: Path) -> str | None:
    """Which file of a checkpoint is missing or not as it was written; None if all are."""
    try:
        written = json.loads((checkpoint / _SUMS).read_text())
        held = _sums(checkpoint)
    except (OSError, ValueError) as error:
        return f"{_SUMS} can't be read ({error})"
    if not isinstance(written, dict):
        return f"{_SUMS} is not as it was written"
    for name, digest in written.items():
        if name not in held:
            return f"{name} is missing"
        if held[name] != digest:
            return f"{name} is damaged: its bytes are not those that were written"
    return None


def require_intact(checkpoint: Path) -> None:
    """A PracticumError if a file of the checkpoint is damaged."""
    if damage := find_damage(checkpoint):
        raise PracticumError(f"checkpoint {checkpoint}: {damage}. Restore it, or name another checkpoint")


def _sums(folder: Path) -> dict[str, str]:
    """The checksum of each file of a checkpoint."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _SUMS:
            with path.open("rb") as file:
                sums[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


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
