"""Rows by number: JSONL, JSON and CSV files, and everything that the `datasets` library reads.

JSON and CSV are read here because `datasets` changes their values: it turns the string 007 into the number 7,
and converts a column to one type. JSONL files are not held in memory.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b, file_digest
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from practicum.errors import DataError, MissingExtraError, RecipeError
from practicum.models.hub import is_unreachable, not_found
from practicum.recipe.schema.recipe import Task
from practicum.user_code import error_line


class _Rows(Protocol):
    """Rows of a file or dataset. A row that can't be read is a DataError with the reason."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a file or dataset. Image paths are relative to the folder."""

    rows: _Rows
    name: str
    folder: Path

    def where(self, index: int) -> str:
        """Return the location of a row, as in an editor."""
        place = f"line {self.rows.lines[index]}" if isinstance(self.rows, _JsonLines) else f"row {index + 1}"
        return f"{self.name}, {place}"


class Table:
    """Concatenated parts. `digest` is a hash of files, or None for a dataset."""

    def __init__(self, parts: Sequence[Part], digest: str | None = None) -> None:
        self._parts, self.digest = parts, digest
        self._ends = list(accumulate(len(part.rows) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part.rows

    def find(self, index: int) -> tuple[Part, int]:
        """Return the part of a row, and the row's number in it."""
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


class _JsonLines:
    """Rows of a JSONL file, read on demand. Blank lines and a byte-order mark are ignored. The file is opened
    for each read, which detects changes, while a memory map would crash the process."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, _stamp(path)
        self._starts, self.lines = array("Q"), array("Q")
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                skip = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
                if line[skip:].strip():
                    self._starts.append(start + skip)
                    self.lines.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> Any:
        return next(self._read(self._starts[index : index + 1]))

    def __iter__(self) -> Iterator[Any]:
        return self._read(self._starts)

    def _read(self, starts: Sequence[int]) -> Iterator[Any]:
        if _stamp(self._path) != self._stamp:
            raise DataError(f"{self._path}: the file changed during the run")
        with self._path.open("rb") as file:
            for start in starts:
                file.seek(start)
                try:
                    yield json.loads(file.readline())
                except (ValueError, RecursionError) as error:
                    yield DataError(f"not JSON: {error}")


class _Arrow:
    """Rows of a dataset without the nulls that Arrow adds to lists of structs, which templates reject."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Any:
        return without_nulls(self._rows[index])

    def __iter__(self) -> Iterator[Any]:
        return map(without_nulls, self._rows)


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:

    def pruned(value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            return value
        return [{k: pruned(v) for k, v in item.items() if v is not None} for item in value]

    return {name: pruned(value) for name, value in row.items()}


def _read_json(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}; for one object per line, name the file .jsonl") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: found {type(rows).__name__}, expected an array of objects")
    return rows


def _read_csv(path: Path) -> list[Any]:
    csv.field_size_limit(sys.maxsize)
    rows: list[Any] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = (line for line in csv.reader(file, strict=True) if line)
            names = next(lines, [])
            if len(set(names)) < len(names):
                raise DataError(f"{path}: the first line names the columns {', '.join(map(repr, names))}")
            for values in lines:
                fault = DataError(f"{len(values)} values for the {len(names)} columns of the first line")
                rows.append(fault if len(values) != len(names) else dict(zip(names, values, strict=True)))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}, row {len(rows) + 1}: not CSV: {error}") from None
    return rows


def _read_parquet(path: Path) -> _Rows:
    datasets = _datasets(f"reading {path}")
    try:
        return _Arrow(datasets.Dataset.from_parquet(str(path)))
    except Exception as error:  # the library raises many types, and each means that the file can't be read
        raise DataError(f"{path}: not a Parquet file that can be read: {error_line(error)}") from error


READERS: dict[str, Callable[[Path], _Rows]] = {
    ".jsonl": _JsonLines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Readers by file extension."""


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(what, "datasets") from None
    datasets.disable_progress_bars()  # they would overwrite our display
    return datasets


@dataclass(frozen=True, slots=True)
class Location:
    """Files and glob patterns, or a split of a dataset. str() is for messages."""

    files: tuple[str, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = ""
    key: str = "file"
    """The task's key that names it."""

    def __str__(self) -> str:
        if self.dataset is None:
            return ", ".join(self.files)
        return f"{self.dataset} ({', '.join(filter(None, [self.subset, self.split]))})"

    def versions(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Return path, time and size of each file, which identify a version of the data."""
        paths = expand(self.files)
        if self.dataset is not None:
            paths = sorted(Path(self.dataset).expanduser().rglob("*"))
        return tuple((str(path.absolute()), _stamp(path)) for path in paths)


def train_location(task: Task) -> Location | None:
    """Return the location of the training rows, or None for a built-in task."""
    if task.dataset is not None:
        return Location((), task.dataset, task.subset, task.split, "dataset")
    return _file_location(task.file, "file")


def eval_location(task: Task) -> Location | None:
    """Return the location of the evaluation rows, or None without any."""
    if task.dataset is None or task.eval_split is None:
        return _file_location(task.eval_file, "eval_file")
    return Location((), task.dataset, task.subset, task.eval_split, "dataset")


def _file_location(files: str | list[str] | None, key: str) -> Location | None:
    paths = [files] if isinstance(files, str) else files
    return None if paths is None else Location(tuple(paths), key=key)


def expand(paths: Sequence[str]) -> list[Path]:
    """Expand paths and patterns such as data/*.jsonl. Matches of a pattern are sorted."""
    files: list[Path] = []
    for path in paths:
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        files += [Path(match) for match in matches or [path]]
    return list(dict.fromkeys(files))


def open_files(paths: Sequence[str], key: str) -> Table:
    """Return the concatenated rows of all files. Errors name the recipe's `key`."""
    parts, digests = [], []
    for path in expand(paths):
        if os.path.isdir(path):
            hint = f"name the files in it, such as {path / '*.jsonl'}"
            hint += f"; {key.rpartition('.')[0]}.dataset takes a dataset's folder"
            raise RecipeError(key, f"the folder {str(path)!r}", "a file", hint)
        if not os.path.isfile(path):
            names = os.listdir(path.parent) if os.path.isdir(path.parent) else []
            near = get_close_matches(path.name, names, n=1)
            hint = f"it exists neither beside the recipe nor in {Path.cwd()}."
            hint = f"did you mean {path.parent / near[0]}?" if near else hint
            raise RecipeError(key, repr(str(path)), "a file that exists", hint)
        if path.suffix not in READERS:
            raise RecipeError(key, repr(str(path)), f"a file ending in {' or '.join(READERS)}")
        with path.open("rb") as file:
            digests.append(file_digest(file, lambda: blake2b(digest_size=16)).hexdigest())  # pyright: ignore
        parts.append(Part(READERS[path.suffix](path), str(path), path.absolute().parent))
    several = blake2b(repr(digests).encode(), digest_size=16).hexdigest()
    return Table(parts, digests[0] if len(digests) == 1 else several)


def open_dataset(at: Location, key: str) -> Table:
    assert at.dataset is not None
    folder, data = Path(at.dataset).expanduser(), load_dataset(at, key)
    folder = folder.absolute() if os.path.isdir(folder) else Path.cwd()
    return Table([Part(_Arrow(data), str(at), folder)])


def load_dataset(at: Location, key: str) -> Any:
    """Load a split with the `datasets` library. Raise RecipeError at `key` if it can't be read."""
    assert at.dataset is not None
    datasets, folder = _datasets(key), Path(at.dataset).expanduser()
    unreachable, is_folder = is_unreachable(at.dataset), os.path.exists(folder)
    try:
        if is_folder and any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(folder)
            return saved[at.split] if isinstance(saved, dict) else saved
        return datasets.load_dataset(str(folder) if is_folder else at.dataset, at.subset, split=at.split)
    except Exception as error:  # the library raises many types, and each means that it has no such data
        if unreachable and isinstance(error, OSError):
            raise not_found(key, at.dataset, "dataset") from None
        found = f"{at.dataset!r}, {f'subset {at.subset!r}, ' if at.subset else ''}split {at.split!r}"
        why = error_line(error.__cause__ or error)
        raise RecipeError(key, found, "a dataset that can be read", why) from None


def _stamp(path: Path) -> tuple[int, int]:
    if not os.path.exists(path):
        return 0, 0
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size
