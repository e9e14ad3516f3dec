"""The run folder: resolved recipe, versions, metrics, samples, log, checkpoints and export.

One run at a time uses a folder. Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import practicum
from practicum.dataplane.stages import Plan, plan_data
from practicum.errors import PracticumError
from practicum.observe.records.json_files import read_mapping, read_versions
from practicum.observe.records.record_files import FOLDER, RecordPlace, record_files
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile

PACKAGES = ("practicum", "torch", "transformers", "numpy", "pydantic", "safetensors")
_GIT_S = 5.0
"""Timeout of git in seconds. On timeout, the commit is not recorded."""
_LOCK_S = 0.5
"""How long to wait for a run that is releasing its lock, in seconds."""
APPENDED = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")
_MARKER = "versions.json"
"""The first file that a run writes, which identifies its folder."""
OWNED = (
    *(*APPENDED, "changes.jsonl", "recipe.yaml", "origins.json", "plan.json", "scores.json"),
    *("tokenizer.json", "log.txt", "wandb.id", "trackio.id", "checkpoints", "export", "exports", FOLDER),
    *("tensorboard", "wandb"),
)
"""Files of a run besides versions.json. --fresh removes only these."""


class RunFolder:
    """Paths and append-only files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self._has_started = False

    @property
    def is_used(self) -> bool:
        return "practicum" in read_mapping(self.path / _MARKER)

    def replace(self, recipe: str) -> None:
        """Start a run: remove the files of an earlier one, then write resolved recipe and versions."""
        for name in OWNED if self.is_used else ():
            path, aside = self.path / name, self.path / f".{name}.old"
            shutil.rmtree(aside, ignore_errors=True)
            if path.is_dir():
                os.replace(path, aside)  # no partial checkpoint remains if the process is killed here
                shutil.rmtree(aside)
            else:
                path.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write(_MARKER, versions() | {"starts": []})  # first: it identifies the folder as a run's
        self.checkpoints.mkdir(exist_ok=True)
        write_atomic(self.path / "recipe.yaml", recipe)

    def note_start(self, recipe: Path) -> None:
        """Record the command and the commits of practicum and the recipe in versions.json."""
        package = Path(practicum.__file__)
        commits = {"practicum": git_state(package.parent, package.name), "recipe": git_state(recipe.parent)}
        start = {"command": shlex.join(sys.orig_argv), "directory": str(Path.cwd()), "commits": commits}
        start |= {"pid": os.getpid(), "host": socket.gethostname(), "started": timestamp()}
        start |= dict.fromkeys(("ended", "outcome", "last_step"))
        self._write(_MARKER, versions() | {"starts": [*read_versions(self.path).get("starts", []), start]})
        self._has_started = True

    def note_end(self, outcome: str, step: int) -> None:
        """Record how this start of the run ended, unless it never wrote to the folder."""
        if self._has_started:
            *before, last = read_versions(self.path)["starts"]
            ended = last | {"ended": timestamp(), "outcome": outcome, "last_step": step}
            self._write(_MARKER, versions() | {"starts": [*before, ended]})

    def write_about(self, origins: Mapping[str, str], plan: Plan) -> None:
        self._write("origins.json", origins)
        self._write("plan.json", plan_data(plan))

    def _write(self, name: str, data: Any) -> None:
        write_atomic(self.path / name, json.dumps(data, indent=1, ensure_ascii=False))

    def recipe(self) -> dict[str, Any]:
        return yamlfile.parse((self.path / "recipe.yaml").read_text(), "recipe.yaml").data

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        append_lines(self.path / name, rows)

    def metrics(self) -> list[dict[str, float]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise PracticumError(f"{path} is damaged: a line of it is not JSON ({error})") from None

    def record_place(self, groups: int | None) -> RecordPlace | None:
        """Return the location of the record of `groups` groups per step (None for all), or None for 0."""
        if groups == 0:
            return None
        return RecordPlace(self.path.absolute() / FOLDER, "local", everything=groups is None)

    def positions(self) -> dict[str, int]:
        """Return the current sizes of append-only files, for a checkpoint."""
        names = (*APPENDED, *(f"{FOLDER}/{path.name}" for path in record_files(self.path / FOLDER)))
        return {n: p.stat().st_size if (p := self.path / n).exists() else 0 for n in names}

    def rewind(self, positions: Mapping[str, int]) -> None:
        """Truncate append-only files to a checkpoint's sizes. Recorded files may be missing."""
        for name, held in self.positions().items():
            path, size = self.path / name, positions.get(name, 0)
            if held < size and name in APPENDED:
                raise PracticumError(
                    f"{path} has {held} bytes, but {size} in the checkpoint: restore the file, or "
                    "remove the checkpoint to resume from the one before it"
                )
            if held > size:
                os.truncate(path, size)

    def log(self, line: str) -> None:
        """Append a line with the time to log.txt, once the run has started. Ignores a full disk."""
        if not (self.path / _MARKER).exists():
            return
        with (
            suppress(OSError),
            (self.path / "log.txt").open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def timestamp() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def folder_of(recipe: Recipe) -> Path:
    return Path(recipe.out or Path("runs") / recipe.name)


def choose_folder(path: Path, *, resume: bool, fresh: bool) -> RunFolder:
    """Return the folder if a run may use it, else raise PracticumError. Writes nothing."""
    folder, problem = RunFolder(path), None
    require_possible(path)
    if resume and not folder.is_used:
        problem = "has no run to resume: remove --resume"
    elif resume and not any(folder.checkpoints.glob("step-*")):
        problem = "has no checkpoint: start again with --fresh"
    elif not resume and not folder.is_used and any((path / name).exists() for name in OWNED):
        problem = (
            "has files that a run would overwrite and that belong to no run: choose another with --out DIR"
        )
    elif folder.is_used and not (resume or fresh):
        problem = (
            "already holds a run: --resume continues it, --fresh replaces it, --out DIR writes elsewhere"
        )
    if problem is not None:
        raise PracticumError(f"{path} {problem}")
    return folder


def require_possible(path: Path) -> None:
    """Raise PracticumError if a run can't write to this folder. Writes and removes a test file."""
    try:
        with _made(path), tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        in_the_way = [str(place) for place in (path, *path.parents) if os.path.isfile(place)]
        why = f"{in_the_way[0]} is a file" if in_the_way else getattr(error, "strerror", None) or str(error)
        raise PracticumError(
            f"{path} can't be the run folder: {why}.\n  → choose another one with --out DIR"
        ) from None


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder until the process ends. Raise PracticumError if another run holds the lock."""
    require_possible(folder)
    path = folder / ".lock"
    with _made(folder):
        try:
            with FileLock(path, timeout=_LOCK_S):
                path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {timestamp()}")
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)  # filelock does not remove the file
        except Timeout:
            holder = path.read_text(errors="replace") if path.exists() else "which has just ended"
            raise PracticumError(
                f"{folder} is in use by another run ({holder}): wait for its end, or choose another folder "
                "with --out DIR"
            ) from None


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder. On exit, remove created folders that are empty."""
    created = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for place in created:
            with suppress(OSError, ValueError):
                place.rmdir()


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    # A lone surrogate, which UTF-8 can't encode, is written as a JSON escape.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_atomic(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def follow_umask(folder: Path) -> None:
    """Apply the umask to a folder's files, because some libraries create private files."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in [folder, *folder.rglob("*")]:
        new_mode = mode | (mode & 0o444) >> 2 if path.is_dir() else mode
        held = path.stat().st_mode
        if held & 0o777 != new_mode:
            path.chmod(held & 0o7000 | new_mode)


def versions() -> dict[str, Any]:
    version_of = {"python": platform.python_version(), "machine": platform.platform()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            version_of[name] = importlib.metadata.version(name)
    return {"practicum": practicum.__version__} | version_of


def git_state(folder: Path, tracked: str | None = None) -> dict[str, Any] | None:
    """Return the commit of a folder's repository, and if tracked files differ from it.

    Return None without git, repository or commit, or if the file `tracked` is untracked, as for a package
    installed inside another repository.
    """
    if tracked is not None and _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    commit, status = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "-uno")
    changed = None if status is None else bool(status)
    return None if commit is None else {"commit": commit, "changed": changed}


def _git(folder: Path, *command: str) -> str | None:
    # In a git hook, these variables name the hook's repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *command],
            env=env | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
