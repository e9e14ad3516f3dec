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
    "no advantages are estimated: remove it, or set reward.weight",
)
_POLICY = read_if(
    lambda recipe: recipe.is_supervised or recipe.distill is None or recipe.has_policy_loss,
    _WITHOUT_REWARD,
    "no policy loss is computed: remove it, or set reward.weight",
)
_COMPARED = read_if(
    lambda recipe: recipe.uses_old_logprobs,
    "with algorithm.loss {0.algorithm.loss}",
    "this loss has no ratio to the policy before the update: remove it",
)
_PENALTY = read_with("algorithm.kl.place", "reward", "loss")
_WEIGHED = read_with("algorithm.mismatch", "token", "sequence")
_IN_REWARD = read_with("algorithm.kl.place", "reward")


def _option(chooser: str, name: str) -> tuple[ReadWhen, ReadWhen]:
    """Return when an option is read that only some estimators (chooser advantage) or losses use."""
    used, traits = (ESTIMATES, estimator_traits) if chooser == "advantage" else (_POLICY, loss_traits)

    def obstacle(chain: Chain) -> str | None:
        chosen = getattr(chain[0].algorithm, chooser)
        return None if name in traits(chosen).reads else f"with algorithm.{chooser} {chosen}"

    return used, ReadWhen(obstacle, f"remove it, or set algorithm.{chooser} to {' or '.join(readers(name))}")


KL_HORIZON = 10_000
"""Sessions over which an adaptive KL weight changes."""


class Kl(Section):
    """KL penalty against a reference policy."""

    place: Literal["off", "reward", "loss"] = key(
        "off", "Add the penalty to the reward, to the loss, or not at all."
    )
    coefficient: float = key(0.05, "Weight of the penalty; with target, its initial value.", _PENALTY, ge=0)
    estimator: KlName = key("k3", "Estimator of the KL divergence.", _PENALTY)
    target: float | None = key(None, "Adapt the weight towards this KL (place: reward).", _IN_REWARD, gt=0)
    reference: str | None = key(
        None, "Reference model, given like model.path. Default: the student's initial weights.", _PENALTY
    )


class Algorithm(Section):
    """Advantages, policy loss and KL penalty."""

    advantage: AdvantageName = key("grpo", "Advantage estimator; none is for supervised training.", ESTIMATES)
    loss: LossName = key(
        "ppo_clip",
        "Policy loss. supervised: SFT on the tasks' answers, or on teachers' correct responses.",
        _POLICY,
    )
    aggregation: AggregationName = key(
        "token_mean", "How token losses are averaged, with counts over the whole batch and without padding."
    )
    clip_low: float = key(
        0.2,
        "Clip the ratio below 1 minus this; dppo: a difference of probabilities.",
        *_option("loss", "clip_low"),
        ge=0,
    )
    clip_high: float = key(
        0.2,
        "Clip the ratio above 1 plus this; dppo: a difference of probabilities.",
        *_option("loss", "clip_high"),
        ge=0,
    )
    gamma: float = key(
        1.0, "Discount per token (gae, reinforce_pp).", *_option("advantage", "gamma"), gt=0, le=1
    )
    lam: float = key(1.0, "GAE's lambda.", *_option("advantage", "lam"), ge=0, le=1)
    entropy: float = key(0.0, "Weight of the entropy bonus.", _option("loss", "entropy")[1], ge=0)
    kl: Kl = key(Kl(), "Penalty against a reference policy.")
    old_logprobs: Literal["auto", "recompute", "rollout"] = key(
        "auto",
        "Denominator of the ratio: recompute in the learner, or use the rollout engine's. auto recomputes "
        "only for several optimizer steps per batch or if advantages need it. With rollout.lag, auto "
        "recomputes only if algorithm.mismatch is set.",
        _POLICY,
        _COMPARED,
    )
    mismatch: Literal["off", "token", "sequence"] = key(
        "off",
        "Importance weights for the mismatch of learner and engine: the ratio of their probabilities before "
        "the update, one per token or one per session (the product over its tokens).",
    )
    mismatch_cap: float = key(2.0, "Truncate these ratios to this maximum.", _WEIGHED, ge=1)


class CriticSection(Section):
    """The value model of PPO, initialised as a copy of the student with a scalar head."""

    lr: float = key(1e-4, "Learning rate.", gt=0)
    warmup_steps: int = key(0, "Steps that train only the critic, before the student's first update.", ge=0)
