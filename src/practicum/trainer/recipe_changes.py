"""Compare a resumed run's recipe with its earlier one: allowed, needs --change, or impossible."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from practicum.errors import PracticumError
from practicum.recipe.places import absolute_files
from practicum.recipe.text.origins import differences

MAY_CHANGE = (
    "train.steps",
    "eval.",
    "checkpoint.",
    "track.",
    "checks.",
    "runtime.",
    "pools.",
    "expected",
    "out",
    "rollout.deadline_s",
)
"""Keys that a resumed run may change freely because no step depends on them (steps: without a decay)."""

_FIXED = {
    "model.random_init": "the checkpoint holds the weights of another model",
    "model.lora": "the checkpoint holds an adapter with other settings",
    "model.path": "the weights are the checkpoint's",
    "model.tokenizer": "the model was trained with the other tokenizer",
    "train.optimizer": "the checkpoint holds the state of the other optimizer",
    "rollout.lag": "the checkpoint holds older weights and their rows for the other lag",
    "model.dtype": "weights and optimizer state in the checkpoint have the other dtype",
}
"""Keys that can't change, and why."""
_SWITCHES = {
    "critic": "a critic's weights and optimizer state are part of every checkpoint",
    "algorithm.kl.target": "an adapted weight is part of every checkpoint, a fixed one is not",
    "student": "a teacher's copy of the student is part of the checkpoint",
}
"""Keys that can't change between null and a value, and why."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed value of the recipe."""

    key: str
    old: Any
    new: Any

    def row(self, step: int) -> dict[str, Any]:
        """Return a row of changes.jsonl. `step` is the first one with the new value."""
        return {"step": step, **asdict(self), "time": time.strftime("%Y-%m-%d %H:%M:%S")}

    def __str__(self) -> str:
        return f"{self.key}: {self.old} → {self.new}"


def allowed_changes(old: dict[str, Any], new: dict[str, Any], *, change: bool = False) -> list[Change]:
    """Return the differences of two resolved recipes. Raise if a run of the old one can't continue with the
    new.

    Without `change`, only keys that no step depends on may differ.
    """
    found = differences(absolute_files(old), absolute_files(new))
    changes = [Change(key, a, b) for key, (a, b) in sorted(found, key=itemgetter(0))]
    if impossible := [f"  {c}\n    {why}" for c in changes if (why := _why_not(c, new))]:
        raise PracticumError(
            "\n".join(["the run can't continue with these changes:", *impossible])
            + "\n  → resume with the run's recipe, or start a new run with model.path set to this run"
        )
    free = MAY_CHANGE if new["train"]["schedule"] == "constant" else MAY_CHANGE[1:]
    other = [c for c in changes if not c.key.startswith(free)]
    if other and not change:
        raise PracticumError(
            "the recipe differs from that of the run to resume:\n"
            + "\n".join(f"  {c}" for c in other)
            + "\n  → --change continues with the new values and records them in changes.jsonl;\n"
            "    or resume with the run's recipe, or start again with --fresh"
        )
    return changes


def _why_not(change: Change, new: dict[str, Any]) -> str | None:
    """Return why a run can't continue with this change, or None if it can."""
    key, is_switched = change.key, (change.old is None) != (change.new is None)
    for fixed, why in _FIXED.items():
        if key == fixed or key.startswith(f"{fixed}."):
            return why
    name = "student" if key.startswith("teachers.") and key.endswith(".student") else key
    if is_switched and name in _SWITCHES:
        return _SWITCHES[name]
    if key == "algorithm.kl.coefficient" and new["algorithm"]["kl"]["target"] is not None:
        return "the checkpoint holds the adapted coefficient: change kl.target"
    return None
