"""The metrics of a run by name, and as many points of them as a chart can show."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from practicum.trainer.step_metrics import METRICS

POINTS = 300
"""Points of a curve that are sent at most: about one for each pixel of a chart."""


@lru_cache(4096)
def about_metric(name: str) -> str:
    """What a metric is, in a sentence; empty for one that only its user knows."""
    for known, about in METRICS.items():
        if re.fullmatch(re.sub(r"<\w+>", "[^/]+", known), name) and not about.startswith("Other"):
            return about
    return ""


class MetricTable:
    """Columns of metrics.jsonl, each with the steps that have a value."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.last: dict[str, float] = {}
        """The newest value of each metric."""
        self._columns: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; what is no number is left out."""
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

    def clear(self) -> None:
        """Forget all: the file is read from its start."""
        self.steps, self.last, self._columns = [], {}, {}

    @property
    def names(self) -> list[str]:
        """Names of all metrics so far."""
        return sorted(self._columns)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, of all steps that have it."""
        return self._columns.get(name, ([], []))

    def at(self, step: int) -> dict[str, float]:
        """All metrics of one step; step 0 is the evaluation before training."""
        found = {}
        for name, (steps, values) in self._columns.items():
            place = bisect_left(steps, step)
            if place < len(steps) and steps[place] == step:
                found[name] = values[place]
        return found

    def near(self, names: Sequence[str], last: bool, count: int) -> dict[str, list[float]]:
        """The first or last `count` values of these metrics."""
        cut = slice(-count, None) if last else slice(count)
        return {name: self.column(name)[1][cut] for name in names}

    def series(
        self, name: str, first: int | None = None, last: int | None = None, points: int = POINTS
    ) -> dict[str, Any]:
        """A curve for a chart between two steps: means of neighbours with their least and largest.

        `low` and `high` are None where nothing was merged. Values that are not finite are None.
        """
        steps, values = (np.asarray(part, dtype=float) for part in self.column(name))
        inside = np.ones(len(steps), dtype=bool)
        if first is not None:
            inside &= steps >= first
        if last is not None:
            inside &= steps <= last
        return thin(steps[inside], values[inside], points)


def thin(steps: np.ndarray, values: np.ndarray, points: int) -> dict[str, Any]:
    """At most `points` points: each the mean of its neighbours, with their least and largest."""
    finite = np.isfinite(values)
    odd = [[int(s), repr(float(v))] for s, v in zip(steps[~finite][:5], values[~finite][:5], strict=True)]
    if len(steps) <= points:
        shown = [v if math.isfinite(v) else None for v in values.tolist()]
        return {"steps": steps.astype(int).tolist(), "values": shown, "low": None, "high": None, "odd": odd}
    if not finite.any():
        return {"steps": [], "values": [], "low": None, "high": None, "odd": odd}
    steps, values = steps[finite], values[finite]
    points = min(points, len(steps))
    edges = np.linspace(0, len(steps), points + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(steps)))
    return {
        "steps": steps[edges + counts // 2].astype(int).tolist(),
        "values": _rounded(np.add.reduceat(values, edges) / counts),
        "low": _rounded(np.minimum.reduceat(values, edges)),
        "high": _rounded(np.maximum.reduceat(values, edges)),
        "odd": odd,
    }


def _rounded(values: np.ndarray) -> list[float]:
    """Points that stand for several values: as many digits as anybody can see, and half the bytes."""
    return [float(f"{value:.6g}") for value in values.tolist()]
