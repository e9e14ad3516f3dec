"""Two runs side by side: recipe keys that differ, and the first numbers that do."""

from __future__ import annotations

from typing import Any

from practicum.trainer.recipe_changes import changes_of
from practicum.view.run_view import RunView


def compare(first: RunView, second: RunView) -> dict[str, Any]:
    """What the Diff pane shows."""
    keys = [
        {"key": change.key, "a": change.old, "b": change.new}
        for change in changes_of(first.recipe(), second.recipe())
        if change.key not in ("name", "out")
    ]
    difference = _first_metric(first, second)
    numbers = "All metrics are equal." if difference is None else difference["sentence"]
    return {"equal": not keys and difference is None, "sentence": numbers, "keys": keys, "first": difference}


def _first_metric(first: RunView, second: RunView) -> dict[str, Any] | None:
    """The first step with a metric that differs; times are left out."""
    for run in (first, second):
        run.refresh()
    for step in sorted({*first.metrics.steps, *second.metrics.steps}):
        a, b = first.metrics.at(step), second.metrics.at(step)
        for name in sorted(a.keys() | b.keys()):
            if not name.startswith("time/") and "second" not in name and a.get(name) != b.get(name):
                said = f"The metrics differ first in step {step}: {name}"
                return {"step": step, "row": None, "sentence": said, "values": [a.get(name), b.get(name)]}
    return None
