"""Datasets of the `datasets` library, from the hub or a folder: whole, or streamed row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from practicum.errors import DataError, MissingExtraError, RecipeError
from practicum.models.hub import is_unreachable, not_found
from practicum.tasks.files import without_nulls
from practicum.user_code import error_line

BLOCK = 1024
"""Rows of a stream that are read, and shuffled, together."""


def load_dataset(task: str, name: str, subset: str | None, split: str, streaming: bool) -> Any:
    """A split of a dataset; a RecipeError of tasks.<task>.dataset if there is none."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"tasks.{task}.dataset", "datasets") from None
    datasets.disable_progress_bars()  # they would draw into our own display
    folder, key = Path(name).expanduser(), f"tasks.{task}.dataset"
    unreachable = is_unreachable(name)
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return _saved(datasets.load_from_disk(folder), split, streaming)
        return datasets.load_dataset(
            str(folder) if folder.exists() else name, subset, split=split, streaming=streaming
        )
    except Exception as error:  # the library has many, and each means that there is no such data
        if unreachable and isinstance(error, OSError):
            raise not_found(key, name, "dataset") from None
        cause = error.__cause__ or error
        found = f"{name!r}, {f'subset {subset!r}, ' if subset else ''}split {split!r}"
        why = str(cause) if isinstance(cause, DataError) else error_line(cause)
        raise RecipeError(key, found, "a dataset that can be read", why) from None


def _saved(data: Any, split: str, streaming: bool) -> Any:
    """A split of what `save_to_disk` wrote."""
    if isinstance(data, dict):
        if split not in data:
            raise DataError(f"it has no split {split!r}, only {', '.join(map(repr, data))}")
        data = data[split]
    return data.to_iterable_dataset() if streaming else data


class DatasetTable:
    """Rows of a dataset by number: Arrow files that are mapped into memory, or the first rows of a stream."""

    digest = None

    def __init__(self, rows: Any, name: str, folder: Path) -> None:
        self._rows, self._name, self._folder = rows, name, folder

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        return without_nulls(self._rows[index])

    def scan(self) -> Iterator[Any]:
        return map(without_nulls, self._rows)

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"

    def folder(self, index: int) -> Path:
        return self._folder


def first_rows(data: Any, count: int) -> list[dict[str, Any]]:
    """The first rows of a stream."""
    return list(islice(iter(data), count))


class Blocks:
    """A stream's rows in blocks, in order, without end: after the last row comes the first one again.

    Blocks that follow one another are read on; others by skipping from the beginning.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._rows: Iterator[dict[str, Any]] | None = None
        self._number, self._block = -1, []
        self._length: int | None = None

    def find(self, index: int) -> tuple[int, int, Sequence[dict[str, Any]]]:
        """Of number `index` in the endless order: its epoch, its number there, and the rows of its block."""
        epoch, step = divmod(index, self._length or index + 1)
        rows = self._read(step // BLOCK)
        if step % BLOCK < len(rows):
            return epoch, step, rows
        return self.find(index)  # the end was beyond what is known: now it is known

    def _read(self, number: int) -> Sequence[dict[str, Any]]:
        if number == self._number:
            return self._block
        follows = number == self._number + 1 and self._rows is not None
        if not follows:
            self._rows = iter(self._data.skip(number * BLOCK) if number else self._data)
        assert self._rows is not None
        self._number, self._block = number, list(map(without_nulls, islice(self._rows, BLOCK)))
        if len(self._block) < BLOCK:
            self._rows = None
            if self._length is None:
                is_known = self._block or follows or not number
                self._length = number * BLOCK + len(self._block) if is_known else sum(1 for _ in self._data)
                if not self._length:
                    raise DataError("a stream without rows")
        return self._block
