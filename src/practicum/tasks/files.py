"""Dataset files, JSONL and Parquet: every row checked, any row read without holding them all."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from practicum.errors import DataError, MissingExtraError
from practicum.tasks.messages import Content, image_parts
from practicum.tasks.row_faults import find_fault, row_content

_SHOWN = 10
_BOM = b"\xef\xbb\xbf"
SUFFIXES = (".jsonl", ".parquet")


class _Table(Protocol):
    """Rows of a file by number; `where` names one as an editor would; `digest` is of the bytes."""

    digest: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any: ...

    def scan(self) -> Iterator[Any]:
        """Every row in order; in place of one that can't be read, the error."""
        ...

    def where(self, index: int) -> str: ...


class FileSource:
    """The rows of a file. Opening it checks every row; a DataError names bad lines."""

    def __init__(
        self,
        path: str | Path,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        needs_answer: bool = False,
        *,
        images_column: str = "images",
    ) -> None:
        self.path = Path(path)
        self.prompt_column, self.answer_column = prompt_column, answer_column
        self.images_column = images_column
        self.has_messages = self.has_pictures = False
        """Whether any prompt is a list of chat messages, not a string; whether any has pictures."""
        self._table = _open(self.path)
        self._check(needs_answer)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def digest(self) -> str:
        """A hash of the file's content."""
        return self._table.digest

    def row(self, index: int) -> dict[str, Any]:
        """All columns of row `index`, counted from 0."""
        return self._table.row(index)

    def content(self, row: dict[str, Any]) -> Content:
        """What the row's prompt says, with pictures as paths from its file's folder; none is opened."""
        return row_content(row, self.prompt_column, self.images_column, self.path.absolute().parent)

    def where(self, index: int) -> str:
        """File and line of a row, for messages."""
        return f"{self.path}, {self._table.where(index)}"

    def _check(self, needs_answer: bool) -> None:
        faults, count = [], 0
        for index, row in enumerate(self._table.scan()):
            if isinstance(row, Exception):
                fault = f"not JSON: {row}"
            else:
                fault = find_fault(
                    row, self.prompt_column, self.answer_column, needs_answer, self.images_column
                )
                if not fault:
                    self.has_messages |= isinstance(row[self.prompt_column], list)
                    self.has_pictures |= any(True for _ in image_parts(self.content(row)))
            if fault:
                count += 1
                if count <= _SHOWN:
                    faults.append(f"{self.where(index)}: {fault}")
        if count:
            more = [f"… and {count - _SHOWN} more bad rows"] if count > _SHOWN else []
            raise DataError("\n".join([*faults, *more]))
        if not len(self):
            raise DataError(f"{self.path}: the file has no rows")


def _open(path: Path) -> _Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file, neither beside the recipe nor in {Path.cwd()}")
    if path.suffix == ".jsonl":
        return _Jsonl(path)
    if path.suffix == ".parquet":
        return _Parquet(path)
    raise DataError(f"{path}: a dataset file ends in {' or '.join(SUFFIXES)}")


class _Jsonl:
    """One JSON object per line; blank lines and a leading byte-order mark do not count.

    Holds where rows start and end, and opens the file for each read: a file that was changed
    meanwhile is noticed, where a memory map would crash the process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._starts, self._ends, self._lines = array("Q"), array("Q"), array("Q")
        digest = blake2b(digest_size=16)
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                if line[skip:].strip():
                    self._starts.append(start + skip)
                    self._ends.append(start + len(line))
                    self._lines.append(number)
                start += len(line)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Any:
        start = self._starts[index]
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(self._ends[index] - start)
        if _stamp(self._path) != self._stamp:
            raise DataError(f"{self._path}: the file was changed while it was in use")
        return json.loads(line)

    def scan(self) -> Iterator[Any]:
        with self._path.open("rb") as file:
            for start, end in zip(self._starts, self._ends, strict=True):
                file.seek(start)
                try:
                    yield json.loads(file.read(end - start))
                except (ValueError, RecursionError) as error:
                    yield error

    def where(self, index: int) -> str:
        return f"line {self._lines[index]}"


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class _Parquet:
    """A Parquet file, held as an Arrow table."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError(f"reading {path}", "parquet") from None
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error
        digest = blake2b(digest_size=16)
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Any:
        return _without_nulls(self._table.slice(index, 1).to_pylist()[0])

    def scan(self) -> Iterator[Any]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from map(_without_nulls, batch.to_pylist())

    def where(self, index: int) -> str:
        return f"row {index + 1}"


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives each struct of a list all keys of the column; chat templates want none."""
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return [{k: _pruned(v) for k, v in item.items() if v is not None} for item in value]
