"""Weights of each teacher's tokens in the loss (`route.balance`)."""

from __future__ import annotations

from collections.abc import Mapping

LIMIT = 4.0
"""Maximum weight. The minimum is its inverse."""
LEAST_TOKENS = 200
"""Minimum tokens to estimate a teacher's spread. With fewer, its weight is 1."""
GAIN = 0.5
"""Exponent of (target / share) in a step's weight change."""
MEMORY = 0.7
"""Decay of the running mean of the shares."""

Moments = tuple[int, float, float]
"""Number, sum and sum of squares."""


def spread_factors(moments: Mapping[int, Moments]) -> dict[int, float]:
    """Return clip(sigma of all tokens / sigma of the teacher's, 1/4, 4) for each teacher.

    `moments` are of log teacher - log student. Normalisation per domain: DN-MOPD, arXiv:2609.35347.
    """
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
    """Feedback control of the teachers' relative shares of the update.

    Parts of a step that belong to no teacher (momentum, decay, clipping) are excluded.
    """

    def __init__(self, targets: Mapping[int, float] | None = None) -> None:
        self.targets, self.factors = targets, dict[int, float]()
        self._means: dict[int, float] = {}

    def adapt(self, shares: Mapping[int, float], prompts: Mapping[int, int]) -> None:
        """Adapt to the measured shares of a step. The default targets are the shares of the prompts."""
        targets = {number: (self.targets or prompts)[number] for number in shares}
        whole, wanted = sum(shares.values()), sum(targets.values())
        if whole <= 0:  # momentum moved the weights against all teachers
            return
        for number, share in shares.items():
            target = targets[number] / wanted
            before = self._means.get(number, target)
            mean = self._means[number] = MEMORY * before + (1 - MEMORY) * share / whole
            # A teacher with a negative share needs a larger weight.
            ratio = target / max(mean, target / LIMIT**2)
            self.factors[number] = self.factors.get(number, 1.0) * ratio**GAIN
        middle = (max(self.factors.values()) * min(self.factors.values())) ** 0.5  # only ratios matter
        self.factors = {number: _clipped(factor / middle) for number, factor in self.factors.items()}

    def state_dict(self) -> dict[str, float]:
        factors = {f"balance/{number}": factor for number, factor in self.factors.items()}
        return factors | {f"balance_mean/{number}": mean for number, mean in self._means.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for name, value in state.items():
            kind, _, number = name.partition("/")
            (self.factors if kind == "balance" else self._means)[int(number)] = value
