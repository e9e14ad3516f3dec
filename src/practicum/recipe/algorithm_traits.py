"""The table of algorithms: their names, and what each needs and reads.

To add one, write a function of that name in the file of `algorithms`, and a line here. A user's own function
says its traits by a decorator of `practicum.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from practicum.errors import RecipeError
from practicum.recipe.own_parts import PARTS, find_part


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
    centred: bool = False
    """A session's tokens have one advantage, and those of a group's sessions add up to 0."""


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What a loss of the student needs, and the options of `algorithm` that only some losses read."""

    ratio: bool = True
    """It compares each token's probability with the one before the update."""
    clips_ratio: bool = False
    """Ratios outside of 1 - clip_low to 1 + clip_high pull no further."""
    to_sampler: bool = False
    """Its ratio is always to the policy that sampled."""
    whole_sessions: bool = False
    """Its ratio is of all tokens of a session, which no mini-batch or micro-batch may cut."""
    reads: frozenset[str] = frozenset()


_CLIPPED = frozenset({"clip_low", "clip_high", "entropy"})

ESTIMATORS: dict[str, EstimatorTraits] = {
    "none": EstimatorTraits(),
    "gae": EstimatorTraits(critic=True, reads=frozenset({"gamma", "lam"})),
    "grpo": EstimatorTraits(compares_groups=True, centred=True),
    "dr_grpo": EstimatorTraits(compares_groups=True, centred=True),
    "rloo": EstimatorTraits(compares_groups=True, centred=True),
    "reinforce_pp": EstimatorTraits(reads=frozenset({"gamma"})),
    "reinforce_pp_baseline": EstimatorTraits(compares_groups=True),
    "remax": EstimatorTraits(greedy_baseline=True),
}
LOSSES: dict[str, LossTraits] = {
    "supervised": LossTraits(ratio=False),
    "ppo_clip": LossTraits(clips_ratio=True, reads=_CLIPPED),
    "gspo": LossTraits(clips_ratio=True, whole_sessions=True, reads=_CLIPPED),
    "cispo": LossTraits(reads=_CLIPPED),
    "dppo": LossTraits(to_sampler=True, reads=_CLIPPED),
    "reinforce": LossTraits(ratio=False, reads=frozenset({"entropy"})),
}
KL_NAMES = ("k1", "k2", "k3")
AGGREGATION_NAMES = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
ON_DISTRIBUTIONS = ("forward_kl", "reverse_kl", "jsd")
"""Divergences of distributions: every signal but sampled."""
ON_TOP_K = ("unbiased_reverse_kl",)
"""Divergences of the top-k that also read the sampled token's logprob."""
ON_SAMPLED = ("k1", "k2", "k3", "k1_straight", "k3_straight", "abs", "mse")
"""Divergences of the sampled token's logprob."""

ESTIMATOR_OPTIONS = frozenset[str]().union(*(traits.reads for traits in ESTIMATORS.values()))
LOSS_OPTIONS = frozenset[str]().union(*(traits.reads for traits in LOSSES.values()))
OWN_ESTIMATOR, OWN_LOSS = EstimatorTraits(reads=ESTIMATOR_OPTIONS), LossTraits(reads=LOSS_OPTIONS)
"""Traits of a user's function that says nothing of itself: it may read every option."""
Traits = TypeVar("Traits", EstimatorTraits, LossTraits)


def estimator_traits(name: str) -> EstimatorTraits:
    return _traits("advantage", name, ESTIMATORS, OWN_ESTIMATOR)


def loss_traits(name: str) -> LossTraits:
    return _traits("policy_loss", name, LOSSES, OWN_LOSS)


def _traits(kind: str, name: str, builtin: Mapping[str, Traits], silent: Traits) -> Traits:
    if name in builtin:
        return builtin[name]
    traits = getattr(find_part(kind, name, builtin), "traits", silent)
    if not isinstance(traits, type(silent)):
        found = f"{name!r}, which is decorated as another kind of part"
        raise RecipeError(PARTS[kind].key, found, f"a function that is decorated with @{kind}, or not at all")
    return traits


def readers(option: str) -> list[str]:
    """Estimators or losses that read an option of `algorithm`."""
    return sorted(name for name, traits in (ESTIMATORS | LOSSES).items() if option in traits.reads)
