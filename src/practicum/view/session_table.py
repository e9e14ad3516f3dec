"""The recorded sessions of a run in columns, for a table that filters 100,000 of them in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_COLUMNS = ("domain", "task", "teacher", "finish")
NUMBER_COLUMNS = (
    *("step", "prompt", "session", "reward", "advantage", "tokens", "turns", "tool_calls"),
    "version",
)


class SessionTable:
    """Columns of lines of samples.jsonl or eval.jsonl; texts are numbers of `words`."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self.places)

    def clear(self) -> None:
        """Forget all: the file is read from its start."""
        self.words: dict[str, dict[str, int]] = {name: {} for name in TEXT_COLUMNS}
        self.columns: dict[str, list[Any]] = {name: [] for name in (*NUMBER_COLUMNS, *TEXT_COLUMNS)}
        self.places: list[tuple[int, int]] = []
        """Where each line is in its file: position and length."""
        self._by_key: dict[tuple[int, int, int], int] = {}
        self._groups: dict[tuple[int, int], list[int]] = {}

    def add(self, row: Mapping[str, Any], position: int, length: int) -> None:
        """One line; one that names no session is a ValueError."""
        step, group = group_of(row)
        session = row.get("session", 0)
        if not all(isinstance(part, int) for part in (step, group, session)):
            raise ValueError("step, group and session are numbers")
        numbers: dict[str, Any] = {"step": step, "prompt": group, "session": session}
        for name in ("reward", "advantage", "turns", "tool_calls"):
            numbers[name] = _number(row.get(name))
        numbers["tokens"] = _number(row.get("sampled_tokens", row.get("response_tokens")))
        numbers["version"] = _oldest(row.get("version"))
        texts = {name: str(row.get(name) or "") for name in TEXT_COLUMNS}
        if row.get("failure"):
            texts["finish"] = "failed"
        for name, value in numbers.items():
            self.columns[name].append(value)
        for name, text in texts.items():
            words = self.words[name]
            self.columns[name].append(words.setdefault(text, len(words)))
        key = (step, group, session)
        self._by_key[key] = len(self.places)
        self._groups.setdefault(key[:2], []).append(len(self.places))
        self.places.append((position, length))

    def after(self, count: int) -> dict[str, Any]:
        """The rows from number `count` on, as the page holds them; one value stands for a column of it."""
        return {
            "from": count,
            "total": len(self),
            "rows": max(0, len(self) - count),
            "words": {name: list(words) for name, words in self.words.items()},
            "columns": {name: _sent(column[count:]) for name, column in self.columns.items()},
        }

    def row_of(self, step: int, prompt: int, session: int) -> int | None:
        """The number of a session's row."""
        return self._by_key.get((step, prompt, session))

    def group(self, step: int, prompt: int) -> list[int]:
        """Numbers of the rows of a group."""
        return self._groups.get((step, prompt), [])


def _sent(column: list[Any]) -> Any:
    return {"all": column[0]} if len(column) > 1 and column.count(column[0]) == len(column) else column


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _oldest(versions: Any) -> float | None:
    """The oldest weights that sampled a session, of its first and last version."""
    return _number(versions[0]) if isinstance(versions, list) and versions else None


def group_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Step and prompt of a line; earlier versions of practicum call the prompt otherwise."""
    return row.get("step", 0), row.get("group", row.get("prompt_uid", 0))
