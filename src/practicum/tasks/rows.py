"""Rows of a task's data: apply the task's `map`, check rows, and report bad rows with their location."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from practicum.errors import DataError
from practicum.recipe.own_parts import users_errors
from practicum.recipe.schema.recipe import Task
from practicum.recipe.user_functions import import_function
from practicum.tasks.messages import Content, image_parts, message_text, picture_message
from practicum.tasks.prompts import Prompt
from practicum.tasks.tables import Location, Table, open_dataset, open_files
from practicum.user_code import short_repr

IMAGES = "images"
"""Column with the paths of a row's images."""
_SHOWN = 10
_LIKELY = {
    "prompt": ("question", "problem", "instruction", "input", "query", "messages", "conversation", "text"),
    "answer": ("solution", "output", "target", "response", "completion", "final_answer", "label"),
}
"""Common names of the columns in other datasets."""


class _Text(TypedDict):
    type: Literal["text"]
    text: str


class _Image(TypedDict):
    type: Literal["image"]
    image: NotRequired[str]


class _Message(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[Annotated[_Text | _Image, Field(discriminator="type")]], Field(min_length=1)]
    )


_MESSAGES = TypeAdapter(Annotated[list[_Message], Field(min_length=1)])
_PATHS = TypeAdapter(list[Annotated[str, Field(min_length=1)]] | None)


@dataclass(frozen=True, slots=True)
class RowReader:
    """Settings for reading a task's rows: column names, `map`, and domain."""

    task: str
    prompt: str = "prompt"
    answer: str = "answer"
    map: str | None = None
    domain: str | None = None


class RowSource:
    """The rows of a table as prompts, by number. `scan` or `check` checks them once."""

    def __init__(self, table: Table, name: str, reader: RowReader) -> None:
        self.name, self.reader, self._table = name, reader, table
        self.has_messages = self.has_pictures = False
        """True if any prompt is a list of chat messages. The second is True if any has images."""
        self._map = None if reader.map is None else import_function(reader.map, f"tasks.{reader.task}.map")
        self._is_checked = False
        self._bad_answers: dict[str, list[int]] = {}
        self.digest = table.digest or ""
        """Hash of the files, or of the rows if `map` or a dataset may change them."""

    def __len__(self) -> int:
        return len(self._table)

    def where(self, index: int) -> str:
        part, inner = self._table.find(index)
        return part.where(inner)

    def row(self, index: int) -> dict[str, Any]:
        """Return all columns of row `index`, starting at 0."""
        part, inner = self._table.find(index)
        row = part.rows[inner]
        if isinstance(row, DataError):
            raise row
        return self.change(row, part.where(inner))

    def prompt(self, uid: int, index: int, epoch: int = 0) -> Prompt:
        return self.to_prompt(uid, index, epoch, self.row(index))

    def to_prompt(self, uid: int, index: int, epoch: int, row: dict[str, Any]) -> Prompt:
        """Return the prompt of a valid row. Its domain is the task's, the row's, or the task's name."""
        reader = self.reader
        domain = str(reader.domain or row.get("domain") or reader.task)
        content = self.content(index, row)
        return Prompt(uid, reader.task, domain, content, row.get(reader.answer), row, epoch, index)

    def content(self, index: int, row: Mapping[str, Any]) -> Content:
        """Return the content of a valid row's prompt. Image paths are relative to the folder of its file.
        Images precede a string prompt, and fill the image parts of messages."""
        prompt, paths = row[self.reader.prompt], row.get(IMAGES) or []
        if isinstance(prompt, str) and not paths:
            return prompt
        folder = self._folder(index)
        if isinstance(prompt, str):
            return [picture_message([str(folder / path) for path in paths], prompt)]
        places = iter(paths)

        def filled(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image":
                return part
            return {**part, "image": str(folder / (part["image"] if "image" in part else next(places)))}

        return [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [filled(part) for part in message["content"]]}
            for message in prompt
        ]

    def _folder(self, index: int) -> Path:
        return self._table.find(min(index, len(self) - 1))[0].folder

    def change(self, row: Any, where: str) -> Any:
        """Apply the task's `map` to a row. Its exceptions become DataErrors with the user's frames."""
        if self._map is None:
            return row
        what = f"{where}: tasks.{self.reader.task}.map {self.reader.map}"
        with users_errors(what, DataError):
            changed = self._map(copy.deepcopy(row))  # some sources cache their rows
        if not isinstance(changed, dict):
            found = short_repr(changed, 40)
            raise DataError(f"{what} returned {found}, expected a dict with the columns of the row")
        return changed

    def check(self, needs_answer: bool = False) -> None:
        """Check every row once. Raise DataError with the bad rows."""
        if not self._is_checked:
            for _ in self.scan():
                pass
        if needs_answer and self._bad_answers:
            raise DataError(self._describe(self._bad_answers))

    def scan(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield every valid row with its number in one pass, then raise DataError with the bad rows."""
        faults: dict[str, list[int]] = {}
        hash_of_rows = blake2b((self._table.digest or "").encode(), digest_size=16)
        is_plain = self._map is None and self._table.digest is not None
        self._bad_answers.clear()
        for index, raw in enumerate(self._table):
            row: Any = raw
            if isinstance(raw, DataError):
                fault = str(raw)
            else:
                row = raw if self._map is None else self.change(raw, self.where(index))
                fault = find_fault(row, self.reader)
            if fault:
                faults.setdefault(fault, []).append(index)
                continue
            if fault := find_answer_fault(row, self.reader):
                self._bad_answers.setdefault(fault, []).append(index)
            self.has_messages |= isinstance(row[self.reader.prompt], list)
            self.has_pictures |= any(True for _ in image_parts(self.content(index, row)))
            if not is_plain:
                hash_of_rows.update(json.dumps(row, sort_keys=True, default=str).encode())
            yield index, row
        if faults:
            raise DataError(self._describe(faults))
        if not len(self):
            raise DataError(f"{self.name} has no rows")
        self.digest = self.digest if is_plain else hash_of_rows.hexdigest()
        self._is_checked = True

    def _describe(self, faults: Mapping[str, list[int]]) -> str:
        """Return a line for each fault, with its first row and the number of others."""
        lines = []
        for fault, rows in islice(faults.items(), _SHOWN):
            more = f" (and {len(rows) - 1:,} more)" if len(rows) > 1 else ""
            lines.append(f"{self.where(rows[0])}: {fault}{more}")
        hidden = sum(map(len, faults.values())) - sum(len(rows) for rows in islice(faults.values(), _SHOWN))
        return "\n".join([*lines, f"… and {hidden:,} more bad rows"] if hidden else lines)


def open_rows(name: str, task: Task, at: Location, needs_answer: bool = False) -> RowSource:
    """Open the rows at a location, and check them once per process and version of the data."""
    source = find_rows(name, task, at)
    source.check(needs_answer)
    return source


def find_rows(name: str, task: Task, at: Location) -> RowSource:
    """Return the rows at a location, possibly unchecked."""
    return _opened(at, at.versions(), RowReader(name, task.prompt, task.answer, task.map, task.domain))


@lru_cache(8)
def _opened(at: Location, versions: Any, reader: RowReader) -> RowSource:
    key = f"tasks.{reader.task}.{at.key}"
    return RowSource(open_files(at.files, key) if at.files else open_dataset(at, key), str(at), reader)


def find_fault(row: Any, reader: RowReader) -> str | None:
    """Return a description of a fault in a row's prompt, or None if it is valid."""
    if not isinstance(row, dict):
        return f"found {short_repr(row, 40)}, expected an object with named columns"
    if reader.prompt not in row:
        return _missing(row, reader.prompt, "prompt", reader.task)
    prompt, paths = row[reader.prompt], row.get(IMAGES)
    fault = None
    if isinstance(prompt, str):
        fault = None if prompt.strip() else "the prompt is empty"
    elif not isinstance(prompt, list):
        fault = f"found {short_repr(prompt, 40)}, expected a string or a list of messages"
    elif not (fault := _mismatch(_MESSAGES, prompt)):
        if prompt[-1]["role"] == "assistant":
            fault = "the last message is the assistant's, expected a user or tool message"
        elif not any(message_text(message).strip() for message in prompt):
            fault = "every message is empty"
    if fault:
        return f"column {reader.prompt!r}: {fault}"
    fault = _mismatch(_PATHS, paths)
    if not fault and not isinstance(prompt, str):
        places, count = sum("image" not in part for part in image_parts(prompt)), len(paths or [])
        if places != count:
            form = '{"type": "image"} without a path among the parts of a message\'s content'
            fault = f"{count} images for {places} places; each needs one {form}"
    return f"column {IMAGES!r}: {fault}" if fault else None


def find_answer_fault(row: Mapping[str, Any], reader: RowReader) -> str | None:
    if reader.answer not in row:
        return _missing(row, reader.answer, "answer", reader.task)
    answer = row[reader.answer]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"column {reader.answer!r}: found {short_repr(answer, 40)}, expected a string or a number"
    if isinstance(answer, str) and not answer.strip():
        return f"column {reader.answer!r}: the answer is empty"
    return None


def _mismatch(form: TypeAdapter[Any], value: Any) -> str | None:
    try:
        form.validate_python(value, strict=True)
    except ValidationError as error:
        # Report the union member with the deepest location.
        problem = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
        place = ".".join(str(key) for key in problem["loc"] if isinstance(key, int) or key.isidentifier())
        return f"{f'at {place}: ' if place else ''}{problem['msg']}, found {short_repr(problem['input'], 40)}"
    return None


def _missing(row: Mapping[str, Any], column: str, role: str, task: str) -> str:
    hint = ""
    if likely := next((name for name in _LIKELY[role] if name in row), None):
        hint = f"; set tasks.{task}.{role}: {likely}"
    elif len(row) == 1 and any(mark in next(iter(row)) for mark in ";\t|"):
        hint = "; columns of a CSV file are separated by commas"
    elif near := get_close_matches(column, row, n=1):
        hint = f"; did you mean {near[0]!r}?"
    return f"no column {column!r} for the {role}, only {', '.join(map(repr, row)) or 'none'}{hint}"
