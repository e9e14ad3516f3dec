"""What happens when an invariant does not hold: the run stops, or reports and counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from practicum.errors import CheckError
from practicum.recipe.schema.recipe import Checks


class Watch:
    """Applies the recipe's level to each check's finding."""

    def __init__(self, levels: Checks, report: Callable[[str], None]) -> None:
        self.levels, self.report = levels, report
        self.fired: Counter[str] = Counter()

    def looks_at(self, name: str) -> bool:
        """Whether the check is on."""
        return getattr(self.levels, name) != "off"

    def __call__(self, name: str, finding: str | None) -> None:
        """Act on a finding; None means that the invariant holds."""
        if finding is None or not self.looks_at(name):
            return
        sentence = f"check {name}: {finding}"
        if getattr(self.levels, name) == "error":
            raise CheckError(f"{sentence} (checks.{name}: warn lets the run go on)")
        self.fired[name] += 1
        self.report(sentence)
