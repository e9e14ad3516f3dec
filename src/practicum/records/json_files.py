"""JSON files of a run, while it may be writing them: whole ones, and files of lines as they grow."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Taker = Callable[[dict[str, Any], int, int], None]
"""Takes a line's mapping, its position in the file and its length in bytes."""
CHUNK, TAIL = 1 << 24, 1 << 20
"""Bytes that are read at once, and of a file's end."""


def read_mapping(path: Path) -> dict[str, Any]:
    """What a file holds; nothing if it is not there, not whole or no mapping."""
    try:
        return _mapping(path.read_bytes()) or {}
    except OSError:
        return {}


def read_versions(run: Path) -> dict[str, Any]:
    """versions.json of a run, with its starts; nothing if it is not there or not whole."""
    versions = read_mapping(run / "versions.json")
    starts = versions.get("starts")
    whole = [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []
    return versions | {"starts": whole} if versions else {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file so far."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return [row for line in lines if (row := _mapping(line)) is not None]


def _mapping(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a mapping; else nothing."""
    return value if isinstance(value, dict) else {}


def look_up(data: Any, path: str) -> Any:
    """What plain data has at a path such as train.steps; None if there is nothing."""
    for name in path.split("."):
        data = mapping(data).get(name)
    return data


class LineFile:
    """JSON lines of one file. `refresh` gives each new whole line to `take`.

    A file that became shorter (a resumed run cut it back) or was replaced is read again from its start:
    `restart` is called first. A last line without its end is left for later; a line that is no JSON, or
    that `take` refuses with a ValueError, is counted in `broken`.
    """

    def __init__(self, path: Path, take: Taker, restart: Callable[[], None] = lambda: None) -> None:
        self.path, self.broken, self.generation = path, 0, 0
        self._take, self._restart = take, restart
        self._position, self._file_id, self._tail = 0, 0, b""

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        changed = self.was_cut()
        if changed:
            self._position, self._tail, self.broken = 0, b"", 0
            self.generation += 1
            self._restart()
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return changed
        self._file_id = status.st_ino
        return (status.st_size > self._position and self._read_on()) or changed

    def was_cut(self) -> bool:
        """Whether what was read is not all there any more."""
        if not self._position:
            return False
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return True
        if status.st_size < self._position or status.st_ino != self._file_id:
            return True
        return status.st_size > self._position and not self._is_continued()

    def _is_continued(self) -> bool:
        """Whether the last line that was read is still there: a file may be cut and grow again meanwhile."""
        if not self._tail:
            return True
        with self.path.open("rb") as file:
            file.seek(self._position - len(self._tail))
            return file.read(len(self._tail)) == self._tail

    def _read_on(self) -> bool:
        found = False
        with self.path.open("rb") as file:
            file.seek(self._position)
            rest = b""
            while chunk := file.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take_line(line)
                    found = True
        return found

    def _take_line(self, line: bytes) -> None:
        at, self._position = self._position, self._position + len(line) + 1
        self._tail = line[-200:] + b"\n"
        if not line.strip():
            return
        try:
            if (row := _mapping(line)) is None:
                raise ValueError("no mapping")
            self._take(row, at, len(line))
        except ValueError:
            self.broken += 1

    def line_at(self, position: int, length: int) -> dict[str, Any]:
        """One line again, by where it is."""
        with self.path.open("rb") as file:
            file.seek(position)
            return json.loads(file.read(length))


def last_rows(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The whole JSON lines at the end of a file, without reading the rest: of the last step, or `count`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            lines = file.read(TAIL).split(b"\n")
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    for line in reversed(lines[1 if size > TAIL else 0 : -1]):
        if (row := _mapping(line)) is None:
            continue  # `LineFile` counts it
        if len(found) == count or (count is None and found and row.get("step") != found[0].get("step")):
            break
        found.append(row)
    return found[::-1]


def find_rows(path: Path, places: Sequence[tuple[int, int]], text: str) -> list[int]:
    """Numbers of the lines, by their places, in which people read `text`; A to Z are equal to a to z."""
    wanted = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "backslashreplace").lower()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    # The whole file is searched first: few lines are then read as JSON.
    lower, starts, found, at = data.lower(), [begin for begin, _ in places], [], 0
    while (at := lower.find(wanted, at)) >= 0:
        row = bisect_right(starts, at) - 1
        if row < 0:
            break
        begin, length = places[row]
        said = json.loads(data[begin : begin + length])
        if any(text.casefold() in one.casefold() for one in _texts(said)):
            found.append(row)
        at = max(at + 1, begin + length)
    return found


def _texts(line: Mapping[str, Any]) -> Iterator[str]:
    """What people read of a session: all its turns."""
    for name in ("prompt", "response", "expected", "failure"):
        if (text := line.get(name)) is not None:
            yield str(text)
    for one in line.get("trajectories") or ():
        yield one["prompt"]
        yield from (span["text"] for span in one["spans"])
