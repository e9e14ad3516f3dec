"""JSON files of a run, while it may be writing them: whole ones, and files of lines as they grow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Taker = Callable[[dict[str, Any], int, int], None]
"""Takes a line's mapping, its position in the file and its length in bytes."""
CHUNK = 1 << 24
"""Bytes that are read together."""


def read_mapping(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing if it is not there, not whole or no mapping."""
    try:
        return _mapping(path.read_bytes()) or {}
    except OSError:
        return {}


def read_versions(run: Path) -> dict[str, Any]:
    """Return versions.json of a run, with its starts; nothing if it is not there or not whole."""
    versions = read_mapping(run / "versions.json")
    starts = versions.get("starts")
    whole = [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []
    return versions | {"starts": whole} if versions else {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file so far."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return [row for line in lines if (row := _mapping(line)) is not None]


def _mapping(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a mapping, or an empty one."""
    return value if isinstance(value, dict) else {}


def look_up(data: Any, path: str) -> Any:
    """Return what plain data has at a path such as train.steps, or None if there is nothing."""
    for name in path.split("."):
        data = mapping(data).get(name)
    return data


class LineFile:
    """JSON lines of one file. `refresh` passes each new whole line to `take`.

    A file that became shorter (a resumed run cut it back) or was replaced is read again from its start:
    `restart` is called first. A last line without its end is left for later. A line that is no JSON, or
    that `take` refuses with a ValueError, is counted in `broken`.
    """

    def __init__(self, path: Path, take: Taker, restart: Callable[[], None] = lambda: None) -> None:
        self.path, self.broken, self.generation = path, 0, 0
        self._take, self._restart = take, restart
        self._position, self._file_id, self._tail = 0, 0, b""

    def refresh(self) -> bool:
        """Read new lines. Return True if there are any."""
        changed = self.was_cut()
        if changed:
            self._position, self._tail, self.broken = 0, b"", 0
            self.generation += 1
            self._restart()
        if not self.path.exists():
            return changed
        with self.path.open("rb") as file:
            self._file_id, rest = os.fstat(file.fileno()).st_ino, b""
            file.seek(self._position)
            while chunk := file.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take_line(line)
                    changed = True
        return changed

    def was_cut(self) -> bool:
        """Return True if the file was cut since, even if it has grown again."""
        if not self._position:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._position - len(self._tail))
                held = os.fstat(file.fileno()).st_ino, file.read(len(self._tail))
        except FileNotFoundError:
            return True
        return held != (self._file_id, self._tail)

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


def find_rows(path: Path, places: Sequence[tuple[int, int]], text: str) -> list[int]:
    """Return the numbers of the lines, by their places, in which people read `text`, in any case."""
    if not places:
        return []
    wanted = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "backslashreplace").lower()
    data, rows = path.read_bytes(), []
    lower = data.lower()  # of A to Z alone; few lines are then read as JSON
    for row, (begin, length) in enumerate(places):
        if lower.find(wanted, begin, begin + length) >= 0:
            line = json.loads(data[begin : begin + length])
            if any(text.casefold() in part.casefold() for part in _texts(line)):
                rows.append(row)
    return rows


def _texts(line: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people read of a session: all its turns."""
    for name in ("prompt", "response", "expected", "failure"):
        if (text := line.get(name)) is not None:
            yield str(text)
    for one in line.get("trajectories") or ():
        yield one["prompt"]
        yield from (span["text"] for span in one["spans"])
