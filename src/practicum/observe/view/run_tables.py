"""Metrics and recorded sessions of a run in columns, as charts and tables of the page take them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

POINTS = 300
"""Points of a curve that are sent at most: about one for each pixel of a chart."""


class MetricTable:
    """Columns of metrics.jsonl, each with the steps that have a value."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all: the file is read from its start."""
        self.steps: list[int] = []
        self.last: dict[str, float] = {}
        """The newest value of each metric."""
        self._columns: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, row: Mapping[str, Any], *_: int) -> None:
        """Add one line of metrics.jsonl, without values that are no numbers."""
        step = row.get("step")
        if not isinstance(step, int):
            return
        self.steps.append(step)
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = self._columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
                self.last[name] = value

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        return self._columns.get(name, ([], []))

    def at(self, step: int) -> dict[str, float]:
        """Return all metrics of one step. Step 0 is the evaluation before training."""
        row = {}
        for name, (steps, values) in self._columns.items():
            place = bisect_left(steps, step)
            if place < len(steps) and steps[place] == step:
                row[name] = values[place]
        return row

    def series(self, name: str, first: float, last: float) -> dict[str, Any]:
        """Return a curve between two steps, downsampled for a chart."""
        steps, values = (np.asarray(part, dtype=float) for part in self.column(name))
        inside = (steps >= first) & (steps <= last)
        return thin(steps[inside], values[inside], POINTS)


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> dict[str, Any]:
    """Return at most `points` points: each the mean of its neighbours, with their least and largest. `low`
    and `high` are None where nothing was merged. `odd` lists the first values that are not finite."""
    finite = np.isfinite(values)
    odd = [[int(s), repr(float(v))] for s, v in zip(steps[~finite][:5], values[~finite][:5], strict=True)]
    if len(steps) <= points:
        curve = {"steps": steps.astype(int).tolist(), "values": values.tolist(), "low": None, "high": None}
        return curve | {"odd": odd}
    steps, values = steps[finite], values[finite]
    edges = np.linspace(0, len(steps), min(points, len(steps)) + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(steps)))
    return {
        "steps": steps[edges + counts // 2].astype(int).tolist(),
        "values": _rounded(np.add.reduceat(values, edges) / counts),
        "low": _rounded(np.minimum.reduceat(values, edges)),
        "high": _rounded(np.maximum.reduceat(values, edges)),
        "odd": odd,
    }


def _rounded(values: np.ndarray) -> list[float]:
    """Round points that stand for several values: as many digits as anybody can see, and half the bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]


TEXT_COLUMNS = ("domain", "task", "teacher", "finish")
NUMBER_COLUMNS = ("reward", "advantage", "turns", "tool_calls")
COLUMNS = ("step", "prompt", "session", "tokens", "version", *NUMBER_COLUMNS, *TEXT_COLUMNS)


class SessionTable:
    """Columns of samples.jsonl or eval.jsonl. Texts are indices into `words`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all: the file is read from its start."""
        self.words: dict[str, dict[str, int]] = {name: {} for name in TEXT_COLUMNS}
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.places: list[tuple[int, int]] = []
        """Where each line is in its file: position and length."""
        self.groups: dict[tuple[int, int], list[int]] = {}
        """Numbers of the rows of each step and prompt."""

    def add(self, row: Mapping[str, Any], position: int, length: int) -> None:
        """Add one line. Raise ValueError if it names no session."""
        step, group, session = (row.get(name, 0) for name in ("step", "group", "session"))
        if not all(isinstance(part, int) for part in (step, group, session)):
            raise ValueError("step, group and session are numbers")
        cells: dict[str, Any] = {"step": step, "prompt": group, "session": session}
        cells |= {name: _number(row.get(name)) for name in NUMBER_COLUMNS}
        cells["tokens"] = _number(row.get("sampled_tokens", row.get("response_tokens")))
        versions = row.get("version")
        cells["version"] = _number(versions[0]) if isinstance(versions, list) and versions else None
        for name in TEXT_COLUMNS:
            text = "failed" if name == "finish" and row.get("failure") else str(row.get(name) or "")
            cells[name] = self.words[name].setdefault(text, len(self.words[name]))
        for name, cell in cells.items():
            self.columns[name].append(cell)
        self.groups.setdefault((step, group), []).append(len(self.places))
        self.places.append((position, length))

    def after(self, count: int) -> dict[str, Any]:
        """Return the rows after the first `count`, in the page's format."""
        return {
            "from": count,
            "rows": max(0, len(self.places) - count),
            "words": {name: list(words) for name, words in self.words.items()},
            "columns": {name: column[count:] for name, column in self.columns.items()},
        }


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
