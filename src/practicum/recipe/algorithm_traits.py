"""The table of algorithms: their names, requirements and options.

To add one, write a function of that name in the file of `algorithms`, and a line here. A user's own function
declares its traits with a decorator of `practicum.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from practicum.errors import RecipeError
from practicum.recipe.own_parts import PARTS, find_part


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """Requirements of an advantage estimator, and the options of `algorithm` that only some of them read."""

    compares_groups: bool = False
    """It compares the sessions of a prompt: a group with equal rewards has no gradient."""
    greedy_baseline: bool = False
    """It compares each session with the reward of a greedy session of the same prompt."""
    critic: bool = False
    """It estimates advantages from a critic's values."""
    reads: frozenset[str] = frozenset()
    centred: bool = False
    """All tokens of a session have one advantage, and a group's advantages sum to 0."""


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Requirements of a loss, and the options of `algorithm` that only some losses read."""

    ratio: bool = True
    """It uses the ratio of each token's probability to that before the update."""
    clips_ratio: bool = False
    """It clips the ratio to 1 - clip_low … 1 + clip_high."""
    to_sampler: bool = False
    """Its ratio is always to the policy that sampled the token."""
    whole_sessions: bool = False
    """Its ratio is of a whole session, which mini-batches and micro-batches must not split."""
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
"""Divergences of distributions: signals top_k and full."""
ON_TOP_K = ("unbiased_reverse_kl",)
"""Divergences of the top-k that also read the sampled token's logprob."""
ON_SAMPLED = ("k1", "k2", "k3", "k1_straight", "k3_straight", "abs", "mse")
"""Divergences of the sampled token's logprob."""

ESTIMATOR_OPTIONS = frozenset[str]().union(*(traits.reads for traits in ESTIMATORS.values()))
LOSS_OPTIONS = frozenset[str]().union(*(traits.reads for traits in LOSSES.values()))
OWN_ESTIMATOR, OWN_LOSS = EstimatorTraits(reads=ESTIMATOR_OPTIONS), LossTraits(reads=LOSS_OPTIONS)
"""Traits of a user's function without a decorator: it may read every option."""
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
        found = f"{name!r}, which has the decorator of another kind of part"
        raise RecipeError(
            PARTS[kind].key, found, f"a function decorated with @{kind}, or without a decorator"
        )
    return traits


def readers(option: str) -> list[str]:
    """Return the estimators or losses that read an option of `algorithm`."""
    return sorted(name for name, traits in (ESTIMATORS | LOSSES).items() if option in traits.reads)
