"""KL(student || reference) on tokens that the student sampled, and the weight of its penalty.

With d = log student(token) - log reference(token) (Schulman 2020, "Approximating KL divergence",
joschu.net/blog/kl-approx.html):

    k1 = d                 unbiased, of either sign
    k2 = d^2 / 2           biased, never negative; its gradient is that of the KL, on policy
    k3 = exp(-d) - 1 + d   unbiased, never negative; its gradient is that of KL(reference || student)

Controllers: fixed, or adaptive (Ziegler et al. 2019, "Fine-tuning language models from human
preferences", arXiv:1909.08593):

    e = clip(KL / target - 1, -0.2, 0.2),  coefficient *= 1 + e * n_steps / horizon
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from practicum.algorithms.exponentials import finite_expm1
from practicum.errors import PracticumError
from practicum.recipe.own_parts import find_part


def k1(log_ratio_N: Tensor) -> Tensor:
    """The log-ratio itself."""
    return log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    """Half the squared log-ratio."""
    return 0.5 * log_ratio_N.square()


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, by expm1 so that a small d keeps its digits; finite wherever d is."""
    return finite_expm1(-log_ratio_N) + log_ratio_N


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class KlTerms:
    """Estimate of each token (0 at masked positions), and where the clamp bit (bool)."""

    kl_N: Tensor
    clamped_N: Tensor


def token_kl(
    kind: str,
    logprobs_N: Tensor,
    ref_logprobs_N: Tensor,
    mask_N: Tensor,
    clamp: float | None = None,
    *,
    part: str = "kl_estimator",
) -> KlTerms:
    """KL of the student to the reference, token by token; `clamp` bounds the log-ratio to ± itself.

    Differentiable in `logprobs_N`; a token whose log-ratio was clamped has no gradient. `part` is the kind of
    part that the estimator is, if it is a user's own.
    """
    estimate = find_part(part, kind, KL_ESTIMATORS)
    log_ratio_N = (logprobs_N - ref_logprobs_N).masked_fill(~mask_N, 0.0)
    clamped_N = torch.zeros_like(mask_N)
    if clamp is not None:
        clamped_N = log_ratio_N.detach().abs() > clamp
        log_ratio_N = log_ratio_N.clamp(-clamp, clamp)
    return KlTerms(estimate(log_ratio_N), clamped_N)


class KlController(Protocol):
    """The weight of the KL penalty over the course of a run."""

    @property
    def coefficient(self) -> float: ...

    def update(self, observed_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKl:
    """A weight that stays as it is; it has no state, so a resumed run takes the recipe's."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, observed_kl: float, n_steps: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        _expect_keys("fixed", state, set())


class AdaptiveKl:
    """A weight that grows while the KL is above `target` and shrinks while it is below."""

    MAX_ERROR = 0.2

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, observed_kl: float, n_steps: int) -> None:
        """Adapts to the KL of `n_steps` sessions; `horizon` counts the same."""
        if math.isnan(observed_kl):
            raise PracticumError("The adaptive KL weight was given a KL that is not a number.")
        if self.MAX_ERROR * n_steps >= self.horizon:
            raise PracticumError(
                f"The horizon {self.horizon} of the adaptive KL weight is too short for updates of "
                f"{n_steps} sessions, one of which could take the weight to zero or below: "
                f"use a horizon above {self.MAX_ERROR * n_steps:g}."
            )
        error = min(max(observed_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.coefficient *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        _expect_keys("adaptive", state, {"coefficient"})
        self.coefficient = state["coefficient"]


def _expect_keys(kind: str, state: dict[str, float], expected: set[str]) -> None:
    if set(state) != expected:
        raise PracticumError(
            f"The saved state of the KL weight has {sorted(state)}, and this run's {kind} weight "
            f"expects {sorted(expected)}: resume with the KL settings that the run started with."
        )
