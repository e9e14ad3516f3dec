"""Two runs side by side, as `practicum diff` compares them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from practicum.records.compare_runs import Comparison, Difference, compare_runs
from practicum.view.run_view import RunView


def compare(first: RunView, second: RunView) -> dict[str, Any]:
    """What the Diff pane shows: recipe keys that differ, and the first number that does."""
    found = compare_runs(first.path, second.path)
    return {
        "equal": found.first is None,
        "sentence": _verdict(found),
        "keys": [{"key": key, "a": a, "b": b} for key, (a, b) in found.recipe.items()],
        "first": None if found.first is None else asdict(found.first) | {"sentence": _place(found.first)},
        "also": found.also,
        "notes": found.notes,
    }


def _verdict(found: Comparison) -> str:
    compared = f"{found.steps} steps ({found.rows} recorded rows and all metrics)"
    if found.first is None:
        return f"The numbers of all {compared} are equal."
    before = f"; {compared} before it are equal" if found.steps else ""
    return f"The numbers differ first in step {found.first.step}{before}."


def _place(first: Difference) -> str:
    row = "" if first.key is None else f" of {first.key}"
    token = "" if first.token is None else f", token {first.token + 1} of the answer"
    return f"{first.field}{row}{token}"
