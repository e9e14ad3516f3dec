"""Files of rows: JSONL, JSON, CSV and Parquet. Any row is read by its number."""

from __future__ import annotations

import csv
import glob
import io
import json
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from practicum.errors import DataError, MissingExtraError

_BOM = b"\xef\xbb\xbf"
_BLANKS = re.compile(r"[ \t\r\n]*")


class Table(Protocol):
    """Rows by number. `where` names one as an editor would; pictures of a row are found from its `folder`.

    `digest` is a hash of the content; None: of the rows as they are read.
    """

    @property
    def digest(self) -> str | None: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any: ...

    def scan(self) -> Iterator[Any]:
        """Every row in order; in place of one that can't be read, the DataError that says why."""
        ...

    def where(self, index: int) -> str: ...

    def folder(self, index: int) -> Path: ...


def expand(paths: Sequence[str]) -> list[Path]:
    """The files that paths and patterns such as data/*.jsonl name, in order; of a pattern, sorted by name."""
    files: list[Path] = []
    for path in paths:
        matches = [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))
        files += [Path(match) for match in matches or [path]]
    return list(dict.fromkeys(files))


def open_files(paths: Sequence[str]) -> Table:
    """The rows of all files, one file after the other."""
    tables = [_open(path) for path in expand(paths)]
    return tables[0] if len(tables) == 1 else _Several(tables)


def _open(path: Path) -> Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file, neither beside the recipe nor in {Path.cwd()}")
    if path.suffix not in READERS:
        raise DataError(f"{path}: a dataset file ends in {' or '.join(READERS)}")
    return READERS[path.suffix](path)


class _Several:
    """Tables one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))
        self.digest = blake2b(repr([t.digest for t in tables]).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Any:
        table, inner = self._place(index)
        return table.row(inner)

    def scan(self) -> Iterator[Any]:
        for table in self._tables:
            yield from table.scan()

    def where(self, index: int) -> str:
        table, inner = self._place(index)
        return table.where(inner)

    def folder(self, index: int) -> Path:
        table, inner = self._place(index)
        return table.folder(inner)

    def _place(self, index: int) -> tuple[Table, int]:
        number = bisect_right(self._ends, index)
        return self._tables[number], index - (self._ends[number - 1] if number else 0)


class _File:
    """What the tables of single files share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.digest: str | None = None

    def folder(self, index: int) -> Path:
        return self._path.absolute().parent

    def where(self, index: int) -> str:
        return f"{self._path}, {self._position(index)}"

    def _position(self, index: int) -> str:
        return f"row {index + 1}"


class _Lines(_File):
    """Rows that begin with a line of their own; blank lines and a leading byte-order mark do not count.

    Holds where rows start and end, and opens the file for each read: a file that was changed
    meanwhile is noticed, where a memory map would crash the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stamp = _stamp(path)
        self._starts, self._ends, self._numbers = array("Q"), array("Q"), array("Q")
        digest = blake2b(digest_size=16)
        with path.open("rb") as file:
            self._index(_hashed(file, digest.update))
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Any:
        start = self._starts[index]
        with self._path.open("rb") as file:
            file.seek(start)
            text = file.read(self._ends[index] - start)
        if _stamp(self._path) != self._stamp:
            raise DataError(f"{self._path}: the file was changed while it was in use")
        return self._parse(text)

    def scan(self) -> Iterator[Any]:
        with self._path.open("rb") as file:
            for start, end in zip(self._starts, self._ends, strict=True):
                file.seek(start)
                try:
                    yield self._parse(file.read(end - start))
                except DataError as error:
                    yield error

    def _position(self, index: int) -> str:
        return f"line {self._numbers[index]}"

    def _index(self, lines: Iterator[bytes]) -> None:
        start = 0
        for number, line in enumerate(lines, start=1):
            skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            if line[skip:].strip():
                self._add(start + skip, start + len(line), number)
            start += len(line)

    def _add(self, start: int, end: int, number: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._numbers.append(number)

    def _parse(self, text: bytes) -> Any:
        """The row, or a DataError with the reason."""
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON: {error}") from None


class _Csv(_Lines):
    """Comma-separated values: the first line names the columns, all values are text."""

    def _index(self, lines: Iterator[bytes]) -> None:
        csv.field_size_limit(sys.maxsize)  # prompts may be longer than the module's 128 KiB
        offsets = array("Q", [0])
        cells = csv.reader(self._decoded(lines, offsets), strict=True)
        self._names: list[str] = []
        while True:
            begin = cells.line_num
            try:
                row = next(cells, None)
            except csv.Error as error:
                raise DataError(f"{self._path}, line {begin + 1}: not CSV: {error}") from None
            if row is None:
                return
            if len(row) < 2 and not "".join(row).strip():
                continue  # a blank line
            if self._names:
                self._add(offsets[begin], offsets[cells.line_num], begin + 1)
                continue
            self._names = [name.strip() for name in row]
            if "" in self._names or len({*self._names}) < len(self._names):
                named = f"the first line names the columns {', '.join(map(repr, self._names))}"
                raise DataError(f"{self._path}: {named}, expected a name of its own for each")

    def _decoded(self, lines: Iterator[bytes], offsets: array[int]) -> Iterator[str]:
        """The lines as text; `offsets` gets where each one ends."""
        for number, line in enumerate(lines, start=1):
            offsets.append(offsets[-1] + len(line))
            try:
                yield line.removeprefix(_BOM if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{self._path}, line {number}: not UTF-8: {error.reason}") from None

    def _parse(self, text: bytes) -> Any:
        cells = next(csv.reader(io.StringIO(text.decode(), newline=""), strict=True))
        if len(cells) != len(self._names):
            raise DataError(f"{len(cells)} values for the {len(self._names)} columns of the first line")
        return dict(zip(self._names, cells, strict=True))


class _Json(_File):
    """A JSON array of objects. The text is held in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        data = path.read_bytes()
        self.digest = blake2b(data, digest_size=16).hexdigest()
        self._starts, self._ends, self._lines = array("Q"), array("Q"), array("Q")
        try:
            self._text = data.decode("utf-8-sig")
            self._index()
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise DataError(f"{path}, {place}: not JSON: {error.msg}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 at byte {error.start}: {error.reason}") from None
        except RecursionError:
            raise DataError(f"{path}: not JSON that can be read: it is nested too deeply") from None

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Any:
        return json.loads(self._text[self._starts[index] : self._ends[index]])

    def scan(self) -> Iterator[Any]:
        return (self.row(index) for index in range(len(self)))

    def _position(self, index: int) -> str:
        return f"line {self._lines[index]}"

    def _index(self) -> None:
        """Find where each item starts and ends; each is decoded once, so what is wrong is found here."""
        text, decoder = self._text, json.JSONDecoder()
        at = self._skip_blanks(0)
        if text[at : at + 1] == "{":
            hint = "for one object per line, name the file .jsonl"
            raise DataError(f"{self._path}: found an object, expected an array of objects; {hint}")
        if text[at : at + 1] != "[":
            raise json.JSONDecodeError("expected an array of objects", text, at)
        line, counted = 1, 0
        at = self._skip_blanks(at + 1)
        is_first = True
        while text[at : at + 1] != "]" or not is_first:
            _, end = decoder.raw_decode(text, at)
            line += text.count("\n", counted, at)
            counted = at
            self._starts.append(at)
            self._ends.append(end)
            self._lines.append(line)
            is_first, at = False, self._skip_blanks(end)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("expected a comma or the end of the array", text, at)
            at = self._skip_blanks(at + 1)
        if (rest := self._skip_blanks(at + 1)) < len(text):
            raise json.JSONDecodeError("something follows the array", text, rest)

    def _skip_blanks(self, at: int) -> int:
        match = _BLANKS.match(self._text, at)
        return match.end() if match else at


class _Parquet(_File):
    """A Parquet file, held as an Arrow table."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
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
        return without_nulls(self._table.slice(index, 1).to_pylist()[0])

    def scan(self) -> Iterator[Any]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from map(without_nulls, batch.to_pylist())


READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _Lines,
    ".json": _Json,
    ".csv": _Csv,
    ".parquet": _Parquet,
}
"""How a file is read, by the end of its name."""


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives each struct of a list all keys of the column; chat templates want none."""
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return [{k: _pruned(v) for k, v in item.items() if v is not None} for item in value]


def _hashed(lines: Iterator[bytes], update: Callable[[bytes], None]) -> Iterator[bytes]:
    for line in lines:
        update(line)
        yield line


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
