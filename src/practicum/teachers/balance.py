"""Weights of each teacher's tokens in the loss (`route.balance`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log

LIMIT = 4.0
"""Maximum weight. The minimum is its inverse."""
LEAST_TOKENS = 200
"""Minimum tokens to estimate a teacher's spread. With fewer, its weight is 1."""
GAIN = 0.5
"""Change of a log weight in a step, as a multiple of (target - share) / target."""

Moments = tuple[int, float, float]
"""Number, sum and sum of squares."""


def spread_factors(moments: Mapping[int, Moments]) -> dict[int, float]:
    """Return clip(sigma of all tokens / sigma of the teacher's, 1/4, 4) for each teacher. `moments` are of
    log teacher - log student. Normalisation per domain: DN-MOPD, arXiv:2609.35347."""
    whole = _sigma((*(sum(parts) for parts in zip(*moments.values(), strict=True)),)) if moments else 0.0
    factors = {}
    for number, own in moments.items():
        sigma = _sigma(own) if own[0] >= LEAST_TOKENS else 0.0
        factors[number] = _clipped(whole / sigma) if sigma > 0 and whole > 0 else 1.0
    return factors


def _sigma(moments: tuple[float, ...]) -> float:
    count, total, squares = moments
    return max(squares / count - (total / count) ** 2, 0.0) ** 0.5 if count else 0.0


def _clipped(factor: float) -> float:
    return min(max(factor, 1 / LIMIT), LIMIT)


class UpdateBalance:
    """Integral control of the teachers' relative shares of the update.

    Each log weight sums up the errors of the shares. So the mean error of a run is the change of the log
    weight / (GAIN × steps), however noisy the shares are. Parts of a step that belong to no teacher
    (momentum, decay, clipping) are excluded.
    """

    def __init__(self, targets: Mapping[int, float] | None = None) -> None:
        self.targets, self._logs = targets, dict[int, float]()

    @property
    def factors(self) -> dict[int, float]:
        """Return the weights by teacher. Only their ratios matter."""
        middle = (max(self._logs.values(), default=0.0) + min(self._logs.values(), default=0.0)) / 2
        return {number: _clipped(exp(own - middle)) for number, own in self._logs.items()}

    def adapt(self, shares: Mapping[int, float], prompts: Mapping[int, int]) -> None:
        """Adapt to the measured shares of a step. The default targets are the shares of the prompts."""
        targets = {number: (self.targets or prompts)[number] for number in shares}
        whole, wanted = sum(shares.values()), sum(targets.values())
        if whole <= 0:  # momentum moved the weights against all teachers
            return
        for number, share in shares.items():
            error = 1 - share / whole * wanted / targets[number]
            changed = self._logs.get(number, 0.0) + GAIN * error
            # Beyond the weights' limit, so that a few extreme steps are made up for, but no more.
            self._logs[number] = min(max(changed, -3 * log(LIMIT)), 3 * log(LIMIT))

    def state_dict(self) -> dict[str, float]:
        return {f"balance/{number}": own for number, own in self._logs.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._logs = {int(name.partition("/")[2]): own for name, own in state.items()}
