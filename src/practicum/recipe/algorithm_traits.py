"""What each advantage estimator and policy loss needs and reads: the one place that knows them by name.

The recipe's checks, the plan, the step, the mini-batches and the learner ask these tables; the functions
themselves are in the registries of `algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """What an advantage estimator needs, and the options of `algorithm` that only some estimators read."""

    compares_groups: bool = False
    """It compares the sessions of one prompt with one another: equal rewards teach nothing."""
    greedy_baseline: bool = False
    """It compares each session with the reward of a greedy session of the same prompt."""
    critic: bool = False
    """It estimates advantages from a critic's values."""
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What a loss of the student needs, and the options of `algorithm` that only some losses read."""

    ratio: bool = True
    """It compares each token's probability with the one before the update."""
    whole_sessions: bool = False
    """Its ratio is of all tokens of a session, which no mini-batch or micro-batch may cut."""
    reads: frozenset[str] = frozenset()


_CLIPPED = frozenset({"clip_low", "clip_high", "log_ratio_clamp", "entropy"})

ESTIMATORS: dict[str, EstimatorTraits] = {
    "none": EstimatorTraits(),
    "gae": EstimatorTraits(critic=True, reads=frozenset({"gamma", "lam", "whiten"})),
    "grpo": EstimatorTraits(compares_groups=True),
    "dr_grpo": EstimatorTraits(compares_groups=True),
    "rloo": EstimatorTraits(compares_groups=True),
    "reinforce_pp": EstimatorTraits(reads=frozenset({"gamma"})),
    "reinforce_pp_baseline": EstimatorTraits(compares_groups=True),
    "remax": EstimatorTraits(greedy_baseline=True),
}
LOSSES: dict[str, LossTraits] = {
    "supervised": LossTraits(ratio=False),
    "ppo_clip": LossTraits(reads=_CLIPPED | {"dual_clip"}),
    "gspo": LossTraits(whole_sessions=True, reads=_CLIPPED | {"dual_clip"}),
    "cispo": LossTraits(reads=_CLIPPED),
    "reinforce": LossTraits(ratio=False, reads=frozenset({"entropy"})),
}


def readers(option: str) -> list[str]:
    """Estimators or losses that read an option of `algorithm`."""
    return sorted(
        name for table in (ESTIMATORS, LOSSES) for name, one in table.items() if option in one.reads
    )
