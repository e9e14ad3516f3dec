"""What happens when an invariant does not hold: the run stops, or reports and counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from practicum.dataplane.batch import BatchRef
from practicum.errors import CheckError
from practicum.recipe.own_parts import find_part, short_name
from practicum.recipe.schema.recipe import Checks, OwnCheck
from practicum.user_code import repr_of


class Watch:
    """Applies the recipe's level to each check's finding. `own` are the user's checks, by name."""

    def __init__(self, levels: Checks, report: Callable[[str], None]) -> None:
        self.levels, self.report = levels, report
        self.own: dict[str, OwnCheck] = {short_name(check.use): check for check in levels.own}
        self.fired: Counter[str] = Counter()

    def level(self, name: str) -> str:
        """The recipe's level of a check."""
        return self.own[name].level if name in self.own else getattr(self.levels, name)

    def looks_at(self, name: str) -> bool:
        """Whether the check is on."""
        return self.level(name) != "off"

    def __call__(self, name: str, finding: str | None) -> None:
        """Act on a finding; None means that the invariant holds."""
        if finding is None or not self.looks_at(name):
            return
        sentence = f"check {name}: {finding}"
        if self.level(name) == "error":
            key = "its level in checks.own" if name in self.own else f"checks.{name}"
            raise CheckError(f"{sentence} ({key}: warn lets the run continue)")
        self.fired[name] += 1
        self.report(sentence)

    def after_step(self, metrics: Mapping[str, float], batch: BatchRef) -> None:
        """Call the user's checks with the metrics and the keys and tags of a step's batch."""
        for name, check in self.own.items():
            if not self.looks_at(name):
                continue
            finding = find_part("check", check.use)(metrics, batch)
            if finding is not None and not isinstance(finding, str):
                raise CheckError(f"check {name} gave {repr_of(finding)}, expected a sentence or None")
            self(name, finding)
