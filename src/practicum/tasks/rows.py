"""Rows of a task's data: each changed by the task's `map`, checked, and named with its place if it is bad."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.recipe.own_parts import users_errors
from practicum.recipe.schema.recipe import Task
from practicum.recipe.user_functions import import_function
from practicum.tasks.files import Table
from practicum.tasks.messages import Content, image_parts
from practicum.tasks.row_faults import find_fault, row_content
from practicum.user_code import error_line, repr_of, type_name

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class RowReader:
    """How a task reads its rows: names of columns, its `map`, and whether an answer is needed."""

    task: str
    prompt: str = "prompt"
    answer: str = "answer"
    images: str = "images"
    map: str | None = None
    needs_answer: bool = False

    def loaded(self) -> Callable[[Any], Any] | None:
        """The function that changes rows, if there is one."""
        return None if self.map is None else import_function(self.map, f"tasks.{self.task}.map")

    def change(self, function: Callable[[Any], Any] | None, row: Any, where: str) -> Any:
        """The row as `map` returns it; what it raises is a DataError with the user's lines of code."""
        if function is None:
            return row
        what = f"{where}: tasks.{self.task}.map {self.map}"
        with users_errors(what, DataError):
            changed = function(copy.deepcopy(row))  # some sources hold their rows
        if not issubclass(type(changed), dict):
            got = "None" if changed is None else f"{type_name(changed)} {repr_of(changed, 40)}"
            raise DataError(f"{what} returned {got}, expected a dict with the columns of the row")
        return changed

    def fault(self, row: Any) -> str | None:
        """What is wrong with a row, in words; None if it is good."""
        try:
            if self.map is not None:  # which may have put anything into it: workers and hashes read it too
                pickle.dumps(row)
                row_bytes(row)
            return find_fault(row, self.prompt, self.answer, self.needs_answer, self.images, self.task)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            found = f"tasks.{self.task}.map {self.map} returned" if self.map else "this is"
            return f"{found} a row that can't be read: that raised {error_line(error)}"

    def content(self, row: Mapping[str, Any], folder: Path) -> Content:
        """What a good row's prompt says, with pictures as paths from the folder; none is opened."""
        return row_content(row, self.prompt, self.images, folder)


def reader_of(name: str, task: Task, needs_answer: bool = False) -> RowReader:
    """How the task of this name reads its rows."""
    return RowReader(name, task.prompt, task.answer, task.images, task.map, needs_answer)


class RowSource:
    """The rows of a table, by number. Making it checks every row; a DataError names bad ones."""

    def __init__(self, table: Table, name: str, reader: RowReader) -> None:
        self.name, self.reader = name, reader
        self.has_messages = self.has_pictures = False
        """Whether any prompt is a list of chat messages, not a string; whether any has pictures."""
        self._table, self._map = table, reader.loaded()
        self.digest = self._check()
        """A hash of the content."""

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> dict[str, Any]:
        """All columns of row `index`, counted from 0."""
        return self.reader.change(self._map, self._table.row(index), self.where(index))

    def content(self, index: int, row: Mapping[str, Any]) -> Content:
        """What the prompt of a row says, with pictures as paths from its file's folder; none is opened."""
        return self.reader.content(row, self._table.folder(index))

    def where(self, index: int) -> str:
        """File and line of a row, for messages."""
        return self._table.where(index)

    def _check(self) -> str:
        """Check every row, and give the digest: of the files, or of what was read where that may differ."""
        faults: dict[str, tuple[int, int]] = {}  # the first row with it, and how many have it
        hidden = 0
        read = blake2b((self._table.digest or "").encode(), digest_size=16)
        is_plain = self._map is None and self._table.digest is not None
        for index, raw in enumerate(self._table.scan()):
            if isinstance(raw, DataError):
                fault = str(raw)
            else:
                row = self.reader.change(self._map, raw, self.where(index)) if self._map else raw
                fault = self.reader.fault(row)
                if not fault:
                    self._look_at(index, row)
                    if not is_plain:
                        read.update(row_bytes(row))
            if fault:
                first, same = faults.get(fault, (index, 0))
                if same or len(faults) < _SHOWN:
                    faults[fault] = first, same + 1
                else:
                    hidden += 1
        if faults:
            more = [f"… and {hidden:,} more bad rows"] if hidden else []
            raise DataError("\n".join([*self._describe(faults), *more]))
        if not len(self):
            raise DataError(f"{self.name}: there are no rows in it")
        return self._table.digest if is_plain and self._table.digest else read.hexdigest()

    def _describe(self, faults: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        """A line for each fault: the first row that has it, and how many more do."""
        for fault, (first, count) in faults.items():
            more = "" if count == 1 else f" (and {count - 1:,} more {'row' if count == 2 else 'rows'})"
            yield f"{self.where(first)}: {fault}{more}"

    def _look_at(self, index: int, row: dict[str, Any]) -> None:
        self.has_messages |= isinstance(row[self.reader.prompt], list)
        self.has_pictures |= any(True for _ in image_parts(self.content(index, row)))


def row_bytes(row: Any) -> bytes:
    """A row as bytes for a hash: the same for equal rows."""
    return json.dumps(row, sort_keys=True, default=str).encode()
