"""The probe after each sync of weights: engine and learner say the same of a fixed sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.recipe.schema.recipe import Recipe

_LIMITS = {"bfloat16": 0.2}
_LIMIT = 1e-3
"""Largest mean |difference| of logprobs in nats, if the recipe says none; by the model's number type."""


class SyncProbe:
    """Compares fingerprints, and remembers them for the next time."""

    def __init__(self, recipe: Recipe, watch: Watch) -> None:
        self._watch = watch
        given = recipe.checks.fingerprint_max
        self._limit = _LIMITS.get(recipe.model.dtype, _LIMIT) if given is None else given
        self._before: dict[int, tuple[Sequence[float], Sequence[float]]] = {}

    @property
    def looks(self) -> bool:
        """Whether the recipe wants it."""
        return self._watch.looks_at("fingerprint")

    def check(self, found: Sequence[Sequence[float]], learner: Callable[[int], Sequence[float]]) -> None:
        """Fingerprints of the engines; `learner` gives its own, for a sequence of so many tokens."""
        lengths = {len(one) + 1 for one in found}
        expected = {length: learner(length) for length in sorted(lengths)}
        for number, one in enumerate(found):
            own, before = expected[len(one) + 1], self._before.get(number)
            self._before[number] = one, own
            finding = invariants.fingerprint(one, own, self._limit, before)
            if finding is not None and len(found) > 1:
                finding = f"engine {number}: {finding}"
            self._watch("fingerprint", finding)
