"""Act on violated invariants: stop the run, or log and count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from practicum.dataplane.batch import BatchRef
from practicum.errors import CheckError
from practicum.recipe.own_parts import find_part, short_name
from practicum.recipe.schema.recipe import Checks
from practicum.user_code import short_repr

CHECKS = frozenset(
    (
        *("weight_version", "fingerprint", "logprob_gap", "sample_size", "masks", "groups", "advantages"),
        *("teacher_shares", "store_empty", "finite"),
    )
)
WARN_ONLY = ("sample_size", "teacher_shares")
"""Checks that never stop a run."""


class Watch:
    """Applies the recipe's level to each check's finding. `own` has custom checks by name."""

    def __init__(self, checks: Checks, report: Callable[[str], None]) -> None:
        self._level, self.logprob_gap_max, self.report = checks.level, checks.logprob_gap_max, report
        self.own = {short_name(use): use for use in checks.own}
        self.fired: Counter[str] = Counter()

    def level(self, name: str) -> str:
        return "warn" if self._level == "error" and name in WARN_ONLY else self._level

    def looks_at(self, name: str) -> bool:
        return self.level(name) != "off"

    def __call__(self, name: str, finding: str | None) -> None:
        """Raise, warn or ignore a violation by the level. None means that the invariant holds."""
        if finding is None or not self.looks_at(name):
            return
        sentence = f"check {name}: {finding}"
        if self.level(name) == "error":
            raise CheckError(f"{sentence} (checks: warn lets the run continue)")
        self.fired[name] += 1
        self.report(sentence)

    def after_step(self, metrics: Mapping[str, float], batch: BatchRef) -> None:
        """Call custom checks with the metrics, and the keys and tags of a step's batch."""
        for name, use in self.own.items():
            if not self.looks_at(name):
                continue
            finding = find_part("check", use)(metrics, batch)
            if finding is not None and not isinstance(finding, str):
                raise CheckError(f"check {name} returned {short_repr(finding)}, expected a string or None")
            self(name, finding)
