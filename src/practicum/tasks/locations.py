"""Where the rows of a task are, files or a split of a dataset, and opening them once per process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from practicum.recipe.schema.recipe import Task
from practicum.tasks.files import expand, open_files
from practicum.tasks.hub_datasets import DatasetTable, first_rows, load_dataset
from practicum.tasks.rows import RowReader, RowSource, reader_of

LOOKED_AT = 2_000
"""Rows of a stream that are looked at before a run."""
Stamp = tuple[tuple[str, int, int], ...]
"""Path, time and size of each file."""


@dataclass(frozen=True, slots=True)
class Location:
    """Files and patterns of files, or a split of a dataset. As text it is for messages."""

    files: tuple[str, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = ""
    streaming: bool = False

    def __str__(self) -> str:
        if self.dataset is None:
            return ", ".join(self.files)
        return f"{self.dataset} ({', '.join(filter(None, [self.subset, self.split]))})"

    def stamp(self) -> Stamp:
        """Tells versions of the files, or of a dataset's folder, apart."""
        paths = expand(self.files)
        if self.dataset is not None:
            paths = sorted(Path(self.dataset).expanduser().rglob("*"))
        return tuple((str(path.absolute()), *_version(path)) for path in paths)


def train_location(task: Task) -> Location | None:
    """Where the training rows are; None for a built-in task."""
    if task.dataset is not None:
        return Location((), task.dataset, task.subset, task.split, task.streaming)
    return None if task.file is None else Location(_names(task.file))


def eval_location(task: Task) -> Location | None:
    """Where the evaluation rows are, if the task has some."""
    if task.dataset is not None:
        if task.eval_split is None:
            return None
        return Location((), task.dataset, task.subset, task.eval_split, task.streaming)
    return None if task.eval_file is None else Location(_names(task.eval_file))


def open_rows(
    name: str, task: Task, at: Location, needs_answer: bool = False, at_least: int = 0
) -> RowSource:
    """The rows at a location, read as the task of this name says; they are checked once per process.

    Of a stream, its first rows: at least `at_least` of them.
    """
    looked_at = max(at_least, LOOKED_AT) if at.streaming else 0
    return _opened(at, at.stamp(), reader_of(name, task, needs_answer), looked_at)


@lru_cache(8)
def _opened(at: Location, stamp: Stamp, reader: RowReader, looked_at: int) -> RowSource:
    """`stamp` tells versions of the data apart."""
    table = open_files(at.files) if at.files else _dataset(at, stamp, reader.task, looked_at)
    return RowSource(table, str(at), reader)


@lru_cache(8)
def _dataset(at: Location, stamp: Stamp, task: str, looked_at: int) -> DatasetTable:
    """Loaded once, however the rows are read."""
    assert at.dataset is not None
    data = load_dataset(task, at.dataset, at.subset, at.split, at.streaming)
    folder = Path(at.dataset).expanduser()
    folder = folder.absolute() if folder.is_dir() else Path.cwd()
    return DatasetTable(first_rows(data, looked_at) if at.streaming else data, str(at), folder)


def _names(files: str | list[str]) -> tuple[str, ...]:
    return (files,) if isinstance(files, str) else tuple(files)


def _version(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
