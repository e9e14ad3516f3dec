"""The recipe's algorithm: advantages, the policy loss, the KL penalty, the critic and the mismatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from practicum.recipe.algorithm_traits import (
    AGGREGATION_NAMES,
    ESTIMATORS,
    KL_NAMES,
    LOSSES,
    estimator_traits,
    loss_traits,
    readers,
)
from practicum.recipe.schema.section import Chain, OwnName, ReadWhen, Section, key, read_if, read_with

if TYPE_CHECKING:
    AdvantageName = LossName = KlName = AggregationName = str
else:
    AdvantageName = Literal[tuple(ESTIMATORS)] | OwnName
    LossName = Literal[tuple(LOSSES)] | OwnName
    KlName = Literal[KL_NAMES] | OwnName
    AggregationName = Literal[AGGREGATION_NAMES] | OwnName

_WITHOUT_REWARD = "with reward.weight 0 and distill.apply_as {0.distill.apply_as}"
ESTIMATES = read_if(
    lambda recipe: recipe.is_supervised or recipe.distill is None or recipe.has_advantage_estimator,
    _WITHOUT_REWARD,
    "no advantage is estimated then: remove it, or set reward.weight",
)
_POLICY = read_if(
    lambda recipe: recipe.is_supervised or recipe.distill is None or recipe.has_policy_loss,
    _WITHOUT_REWARD,
    "there is no policy loss then: remove it, or set reward.weight",
)
_COMPARED = read_if(
    lambda recipe: recipe.uses_old_logprobs,
    "with algorithm.loss {0.algorithm.loss}",
    "it does not compare with the policy before the update: remove it",
)
_PENALTY = read_with("algorithm.kl.place", "reward", "loss")
_WEIGHED = read_with("algorithm.mismatch.weights", "token", "sequence")
_IN_REWARD = read_with("algorithm.kl.place", "reward")


def _option(chooser: str, name: str) -> tuple[ReadWhen, ReadWhen]:
    """When an option is read that only some estimators (chooser advantage) or losses read."""
    used, traits = (ESTIMATES, estimator_traits) if chooser == "advantage" else (_POLICY, loss_traits)

    def obstacle(chain: Chain) -> str | None:
        chosen = getattr(chain[0].algorithm, chooser)
        return None if name in traits(chosen).reads else f"with algorithm.{chooser} {chosen}"

    return used, ReadWhen(obstacle, f"remove it, or set algorithm.{chooser} to {' or '.join(readers(name))}")


KL_HORIZON = 10_000
"""Sessions over which an adaptive KL weight changes."""


class Kl(Section):
    """Penalty for moving away from a reference policy."""

    place: Literal["off", "reward", "loss"] = key("off", "Where the penalty enters.")
    coefficient: float = key(0.05, "Weight of the penalty (start, if adaptive).", _PENALTY, ge=0)
    estimator: KlName = key("k3", "Estimator of the divergence.", _PENALTY)
    target: float | None = key(None, "Adapt the weight towards this KL (reward only).", _IN_REWARD, gt=0)
    reference: str | None = key(
        None, "Reference model, named as in model.path; the student's start if unset.", _PENALTY
    )


class Mismatch(Section):
    """Importance weights: the learner's probability of a token before the update over the engine's."""

    weights: Literal["off", "token", "sequence"] = key(
        "off", "A ratio for each token, or one for a session: the product of its tokens'."
    )
    cap: float = key(2.0, "Largest ratio; larger ones become this.", _WEIGHED, ge=1)


class Algorithm(Section):
    """What is learnt from an answer."""

    advantage: AdvantageName = key(
        "grpo", "Estimator of the advantage; none only for supervised training.", ESTIMATES
    )
    loss: LossName = key(
        "ppo_clip",
        "Policy loss; supervised: on demonstrations, or with teachers on their right answers.",
        _POLICY,
    )
    aggregation: AggregationName = key(
        "token_mean", "How token losses become one number, by global real counts."
    )
    clip_low: float = key(
        0.2, "How far the ratio may fall below 1; dppo: a probability.", *_option("loss", "clip_low"), ge=0
    )
    clip_high: float = key(
        0.2, "How far the ratio may rise above 1; dppo: a probability.", *_option("loss", "clip_high"), ge=0
    )
    gamma: float = key(
        1.0, "Discount per token (gae, reinforce_pp).", *_option("advantage", "gamma"), gt=0, le=1
    )
    lam: float = key(1.0, "GAE's lambda.", *_option("advantage", "lam"), ge=0, le=1)
    entropy: float = key(0.0, "Weight of the entropy bonus.", _option("loss", "entropy")[1], ge=0)
    kl: Kl = key(Kl(), "Penalty against a reference policy.")
    old_logprobs: Literal["auto", "recompute", "rollout"] = key(
        "auto",
        "Denominator of the ratio: recomputed by the learner, the engine's own, or auto: recomputed only "
        "if a batch gets more than one optimizer step or its advantages need them; with rollout.lag the "
        "engine's own, unless algorithm.mismatch weighs the recomputed ones.",
        _POLICY,
        _COMPARED,
    )
    mismatch: Mismatch = key(Mismatch(), "Weights where the engine differs from the learner.")


class CriticSection(Section):
    """The value model of PPO; starts as a copy of the student with a scalar head."""

    lr: float = key(1e-4, "Learning rate.", gt=0)
    warmup_steps: int = key(0, "Steps in which only the critic learns.", ge=0)
