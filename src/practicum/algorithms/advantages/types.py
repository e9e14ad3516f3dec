"""What every advantage estimator takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

# Added to every standard deviation that divides.
EPS = 1e-6


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch of sessions, packed.

    `token_rewards_N` holds all rewards: the outcome at a session's last sampled token, per-token
    rewards, KL penalties. A session's score is their sum over its sampled tokens. `group_S` numbers
    the prompts, `baseline_S` is the greedy reward of each session's prompt (remax), `values_N` the
    critic's (gae).
    """

    token_rewards_N: Tensor
    mask_N: Tensor
    session_N: Tensor
    group_S: Tensor
    baseline_S: Tensor | None = None
    values_N: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages (0 at masked positions), the critic's targets if there are any, and counts."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    stats: dict[str, float] = field(default_factory=dict)
