"""The run folder: resolved recipe, versions, metrics, recorded answers, log, checkpoints, export."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from practicum.dataplane.stages import Plan, plan_data
from practicum.errors import PracticumError
from practicum.recipe.derived import recorded_groups
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.show_recipe import resolved_yaml
from practicum.records.json_files import read_mapping, read_versions
from practicum.records.record_files import FOLDER, RecordPlace, record_files
from practicum.trainer.versions import now, versions
from practicum.user_code import writable

APPENDED = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")
_MARKER = "versions.json"
"""The first file that a run writes, by which its folder is known."""
OWNED = (
    *APPENDED,
    "changes.jsonl",
    "recipe.yaml",
    "origins.json",
    "plan.json",
    "scores.json",
    "tokenizer.json",
    "log.txt",
    "wandb.id",
    "trackio.id",
    "checkpoints",
    "export",
    "exports",
    FOLDER,
    "tensorboard",
    "wandb",
)
"""What a run writes in addition to versions.json, which marks its folder; nothing else is ever removed."""
_PIECE = 1 << 20


class RunFolder:
    """Paths and append-only files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self._has_started = False
        self._summed: dict[str, tuple[int, int]] = {}
        """Of each appended file, how many bytes have been read for its checksum, and the checksum so far."""

    @property
    def is_used(self) -> bool:
        """Whether a run has been here."""
        return "practicum" in read_mapping(self.path / _MARKER)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        return any(self.checkpoints.glob("step-*"))

    @property
    def is_foreign(self) -> bool:
        """Whether files of somebody else's are here that a run would write over."""
        return not self.is_used and any((self.path / name).exists() for name in OWNED)

    def replace(self, recipe: Recipe) -> None:
        """Begin a run, in place of one that was here: its recipe as resolved, and what it runs on."""
        for name in OWNED if self.is_used else ():
            path, aside = self.path / name, self.path / f".{name}.old"
            shutil.rmtree(aside, ignore_errors=True)
            if path.is_dir():
                os.replace(path, aside)  # a process that is killed now leaves no half of a checkpoint
                shutil.rmtree(aside)
            else:
                path.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write_versions([])  # before all else: it says that what follows is a run's
        self.checkpoints.mkdir(exist_ok=True)
        self.write_recipe(recipe)

    def note_start(self, start: Mapping[str, Any]) -> None:
        """Add a start of the run to versions.json: the first, or one that resumes it."""
        self._write_versions([*read_versions(self.path).get("starts", []), start])
        self._has_started = True

    def note_end(self, outcome: str, step: int) -> None:
        """How this start of the run ended, after which step; nothing if it never used the folder."""
        if self._has_started:
            *before, last = read_versions(self.path)["starts"]
            self._write_versions([*before, last | {"ended": now(), "outcome": outcome, "last_step": step}])

    def _write_versions(self, starts: Sequence[Mapping[str, Any]]) -> None:
        text = json.dumps({**versions(), "starts": starts}, indent=2, ensure_ascii=False)
        write_atomic(self.path / _MARKER, text)

    def write_recipe(self, recipe: Recipe) -> None:
        """The recipe as resolved: every value that the run goes by."""
        write_atomic(self.path / "recipe.yaml", resolved_yaml(recipe))

    def write_about(self, origins: Mapping[str, str], plan: Plan) -> None:
        """For people: where each value of the recipe came from, and the stages of a step."""
        write_atomic(self.path / "origins.json", json.dumps(origins, indent=1, ensure_ascii=False))
        write_atomic(self.path / "plan.json", json.dumps(plan_data(plan), indent=1, ensure_ascii=False))

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe of the run that is here."""
        return yaml.safe_load((self.path / "recipe.yaml").read_text())

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add JSON lines to one of `APPENDED` or changes.jsonl."""
        append_lines(self.path / name, rows)

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step so far."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise PracticumError(f"{path} is damaged: a line of it is not JSON ({error})") from None

    def record_place(self, recipe: Recipe) -> RecordPlace | None:
        """Where the run's rows and stages are recorded; None if they are not."""
        if recorded_groups(recipe) == 0:
            return None
        return RecordPlace(self.path.absolute() / FOLDER, "local", everything=recipe.track.record == "all")

    def positions(self) -> dict[str, int]:
        """Sizes of the appended files now, for a checkpoint."""
        recorded = [f"{FOLDER}/{path.name}" for path in record_files(self.path / FOLDER)]
        names = (*APPENDED, *recorded)
        return {n: p.stat().st_size if (p := self.path / n).exists() else 0 for n in names}

    def record_sums(self) -> dict[str, int]:
        """Checksums of the appended files as they are now, for a checkpoint."""
        for name in APPENDED:
            size = path.stat().st_size if (path := self.path / name).exists() else 0
            read, checksum = self._summed.get(name, (0, 0))
            if size < read:  # it was cut back to a checkpoint
                read, checksum = 0, 0
            self._summed[name] = size, _checksum(path, read, size, checksum)
        return {name: checksum for name, (_, checksum) in self._summed.items()}

    def find_damage(self, positions: Mapping[str, int], sums: Mapping[str, int]) -> str | None:
        """What is wrong with the appended files up to a checkpoint's positions; None if nothing is."""
        for name in APPENDED:
            path, size = self.path / name, positions.get(name, 0)
            held = path.stat().st_size if path.exists() else 0
            if held < size:
                return (
                    f"{path} has {held} bytes, the checkpoint was written at {size}: it was cut or replaced"
                )
            if _checksum(path, 0, size) != sums.get(name, 0):
                return f"{path} is damaged: its first {size} bytes are not those that were written"
        return None

    def rewind(self, positions: Mapping[str, int]) -> None:
        """Cut the appended files back to a checkpoint: what came after it will be written again.

        Files of the record that were removed are not missed.
        """
        recorded = {f"{FOLDER}/{path.name}": 0 for path in record_files(self.path / FOLDER)}
        for name, size in (recorded | dict(positions)).items():
            path = self.path / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)

    def log(self, line: str) -> None:
        """Add a line with the time to log.txt; before the run has begun there is no log.

        One that can't be written, such as on a full disk, must not hide what the line says.
        """
        if not (self.path / _MARKER).exists():
            return
        with suppress(OSError), (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {writable(line)}\n")


def folder_of(recipe: Recipe) -> RunFolder:
    """Where a run of the recipe is, unless --out says otherwise."""
    return RunFolder(Path(recipe.out or Path("runs") / recipe.name))


def choose_folder(recipe: Recipe, out: Path | None, *, resume: bool, fresh: bool) -> RunFolder:
    """The run's folder, if this run may use it. Nothing is removed, and nothing of the run is written."""
    folder = folder_of(recipe) if out is None else RunFolder(out)
    require_possible(folder.path)
    if resume and not folder.is_used:
        raise PracticumError(f"{folder.path} has no run to resume: leave out --resume")
    if resume and not folder.has_checkpoint:
        raise PracticumError(f"{folder.path} has no checkpoint to resume from yet: start again with --fresh")
    if not resume and folder.is_foreign:
        raise PracticumError(
            f"{folder.path} has files that a run would write over and that are not a run's: "
            "choose another folder with --out DIR"
        )
    if folder.is_used and not (resume or fresh):
        raise PracticumError(
            f"{folder.path} holds a run already: --resume continues it, --fresh replaces it, "
            "--out DIR writes elsewhere"
        )
    return folder


def require_possible(path: Path) -> None:
    """A PracticumError if no run can be written to this folder. It is tried, and what was made is removed."""
    made = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        in_the_way = [str(place) for place in (path, *path.parents) if os.path.isfile(place)]
        why = f"{in_the_way[0]} is a file" if in_the_way else getattr(error, "strerror", None) or str(error)
        raise PracticumError(
            f"{path} can't be the run's folder: {why}.\n  → choose another one with --out DIR"
        ) from None
    finally:
        for place in made:
            with suppress(OSError, ValueError):
                place.rmdir()


def _checksum(path: Path, begin: int, end: int, checksum: int = 0) -> int:
    """The checksum of a file's first `end` bytes, given that of its first `begin` bytes."""
    if begin == end:
        return checksum
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(_PIECE, end - begin))):
            checksum, begin = zlib.crc32(piece, checksum), begin + len(piece)
    return checksum


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add JSON lines to a file."""
    # Half of a surrogate pair, which JSON can say and UTF-8 can't, is written as its escape.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def follow_umask(folder: Path) -> None:
    """Give a folder's files the modes that new ones have: some libraries write for their user alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in [folder, *folder.rglob("*")]:
        new_mode = mode | (mode & 0o444) >> 2 if path.is_dir() else mode
        held = path.stat().st_mode
        if held & 0o777 != new_mode:
            path.chmod(held & 0o7000 | new_mode)
