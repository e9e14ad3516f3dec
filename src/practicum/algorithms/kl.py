"""KL(student || reference) on tokens that the student sampled, and the weight of its penalty.

With d = log student(token) - log reference(token) (Schulman 2020, "Approximating KL divergence",
joschu.net/blog/kl-approx.html):

    k1 = d                 unbiased, of either sign
    k2 = d^2 / 2           biased, never negative; its gradient is that of the KL, on policy
    k3 = exp(-d) - 1 + d   unbiased, never negative; its gradient is that of KL(reference || student)

The weight is fixed, or adaptive (Ziegler et al. 2019, "Fine-tuning language models from human
preferences", arXiv:1909.08593):

    e = clip(KL / target - 1, -0.2, 0.2),  coefficient *= 1 + e * sessions / horizon
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from practicum.errors import PracticumError
from practicum.recipe.algorithm_traits import KL_NAMES
from practicum.recipe.own_parts import find_part


def finite_exp(x: Tensor) -> Tensor:
    """exp(x) up to 3/4 of where the dtype ends (66 in float32, 532 in float64), and its tangent beyond.

    There value and slope are too small, but finite and of the right sign.
    """
    limit = _limit(x)
    return x.clamp(max=limit).exp() * (1.0 + (x - limit).clamp(min=0.0))


def finite_expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 with the digits of a small x, and its tangent beyond the limit."""
    limit = _limit(x)
    return torch.expm1(x.clamp(max=limit)) + math.exp(limit) * (x - limit).clamp(min=0.0)


def _limit(x: Tensor) -> float:
    return 0.75 * math.log(torch.finfo(x.dtype).max)


def k1(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N


def k2(log_ratio_N: Tensor) -> Tensor:
    return 0.5 * log_ratio_N.square()


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, by expm1 so that a small d keeps its digits. It is finite wherever d is."""
    return finite_expm1(-log_ratio_N) + log_ratio_N


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {name: globals()[name] for name in KL_NAMES}


def token_kl(
    kind: str, logprobs_N: Tensor, ref_logprobs_N: Tensor, mask_N: Tensor, *, part: str = "kl_estimator"
) -> Tensor:
    """Return the KL of the student to the reference of each token, 0 at masked positions.

    Differentiable in `logprobs_N`. `part` is the kind of part that the estimator is, if it is a user's own.
    """
    estimate = find_part(part, kind, KL_ESTIMATORS)
    return estimate((logprobs_N - ref_logprobs_N).masked_fill(~mask_N, 0.0))


class KlWeight:
    """The weight of the KL penalty: fixed, or with a `target` growing while the KL is above it.

    A fixed weight has no state, so a resumed run takes the recipe's.
    """

    MAX_ERROR = 0.2

    def __init__(self, coefficient: float, target: float | None, horizon: float) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, observed_kl: float, sessions: int) -> None:
        """Adapt to the KL of this many sessions. `horizon` counts sessions too."""
        if self.target is None:
            return
        if math.isnan(observed_kl):
            raise PracticumError("the KL is NaN, so the adaptive KL weight can't be updated")
        if self.MAX_ERROR * sessions >= self.horizon:
            raise PracticumError(
                f"a step of {sessions} sessions could take the adaptive KL weight to zero or below: its "
                f"horizon is {self.horizon:g}\n  → lower train.prompts or rollout.samples, or remove "
                "algorithm.kl.target"
            )
        error = min(max(observed_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.coefficient *= 1.0 + error * sessions / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {} if self.target is None else {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state.keys() != self.state_dict().keys():
            raise PracticumError(
                "the checkpoint was written with another kind of KL weight, fixed or adaptive\n"
                "  → resume with the algorithm.kl that the run started with"
            )
        self.coefficient = state.get("coefficient", self.coefficient)
