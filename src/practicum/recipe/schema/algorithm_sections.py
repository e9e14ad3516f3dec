"""The recipe's algorithm: advantages, the policy loss, the KL penalty, the critic and the mismatch."""

from __future__ import annotations

from typing import Literal

from practicum.recipe.algorithm_traits import estimator_traits, loss_traits, readers
from practicum.recipe.derived import (
    has_advantage_estimator,
    has_policy_loss,
    is_supervised,
    uses_old_logprobs,
)
from practicum.recipe.schema.section import Chain, OwnName, ReadWhen, Section, key, read_if, read_with

AdvantageName = (
    Literal["none", "gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"]
    | OwnName
)
LossName = Literal["supervised", "ppo_clip", "gspo", "cispo", "dppo", "reinforce"] | OwnName

_WITHOUT_REWARD = "with reward.weight 0 and distill.through {0.distill.through}"
ESTIMATES = read_if(
    lambda recipe: is_supervised(recipe) or recipe.distill is None or has_advantage_estimator(recipe),
    _WITHOUT_REWARD,
    "no advantage is estimated then: remove it, or set reward.weight",
)
_POLICY = read_if(
    lambda recipe: is_supervised(recipe) or recipe.distill is None or has_policy_loss(recipe),
    _WITHOUT_REWARD,
    "there is no policy loss then: remove it, or set reward.weight",
)
_COMPARED = read_if(
    uses_old_logprobs,
    "with algorithm.loss {0.algorithm.loss}",
    "it does not compare with the policy before the update: remove it",
)
_PENALTY = read_with("algorithm.kl.place", "reward", "loss")
_WEIGHED = read_with("algorithm.mismatch.weights", "token", "sequence")
_ADAPTED = read_with("algorithm.kl.place", "reward"), read_with("algorithm.kl.target")
_MASKED = _WEIGHED, read_with("algorithm.mismatch.outside", "mask")


def _option(chooser: str, name: str) -> tuple[ReadWhen, ReadWhen]:
    """When an option is read that only some estimators (chooser advantage) or losses read."""
    used, traits = (ESTIMATES, estimator_traits) if chooser == "advantage" else (_POLICY, loss_traits)

    def obstacle(chain: Chain) -> str | None:
        chosen = getattr(chain[0].algorithm, chooser)
        return None if name in traits(chosen).reads else f"with algorithm.{chooser} {chosen}"

    return used, ReadWhen(obstacle, f"remove it, or set algorithm.{chooser} to {' or '.join(readers(name))}")


_CLIP_LOW, _CLIP_HIGH, _DUAL_CLIP, _LOG_RATIO_CLAMP = (
    _option("loss", name) for name in ("clip_low", "clip_high", "dual_clip", "log_ratio_clamp")
)
_GAMMA, _LAM, _WHITEN = (_option("advantage", name) for name in ("gamma", "lam", "whiten"))


class Kl(Section):
    """Penalty for moving away from a reference policy."""

    place: Literal["off", "reward", "loss"] = key("off", "Where the penalty enters.")
    coefficient: float = key(0.05, "Weight of the penalty (start, if adaptive).", _PENALTY, ge=0)
    estimator: Literal["k1", "k2", "k3"] | OwnName = key("k3", "Estimator of the divergence.", _PENALTY)
    target: float | None = key(None, "Adapt the weight towards this KL (reward only).", _ADAPTED[0], gt=0)
    horizon: int = key(10_000, "Sessions over which the adaptation acts.", *_ADAPTED, ge=1)
    clamp: float | None = key(None, "Clamp log-ratios to ± this; off if unset.", _PENALTY, gt=0)
    reference: str | None = key(
        None, "Reference model, named as in model.path; the student's start if unset.", _PENALTY
    )


class Reject(Section):
    """Which sessions are too far from the learner to learn from."""

    low: float = key(
        ..., "Least geometric mean of the ratios of a session's tokens; 0 = no bound.", ge=0, lt=1
    )
    high: float = key(..., "Largest such mean.", gt=1)


class Mismatch(Section):
    """Importance weights: the learner's probability of a token before the update over the engine's."""

    weights: Literal["off", "token", "sequence"] = key(
        "off", "A ratio for each token, or one for a session: the product of its tokens'."
    )
    outside: Literal["truncate", "mask"] = key(
        "truncate", "A ratio above cap becomes cap; or outside of floor to cap, 0.", _WEIGHED
    )
    cap: float = key(2.0, "Largest ratio.", _WEIGHED, ge=1)
    floor: float = key(0.0, "Least ratio, with outside: mask; 0 = no bound.", *_MASKED, ge=0, le=1)
    reject: Reject | None = key(None, "Leave out whole sessions by the geometric mean of their ratios.")


class Algorithm(Section):
    """What is learnt from an answer."""

    advantage: AdvantageName = key(
        "grpo", "Estimator of the advantage; none only for supervised training.", ESTIMATES
    )
    loss: LossName = key("ppo_clip", "Policy loss, or supervised training on demonstrations.", _POLICY)
    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] | OwnName = key(
        "token_mean", "How token losses become one number, by global real counts."
    )
    clip_low: float = key(
        0.2,
        "Lower clip range of the ratio (1 - this); dppo: how far a probability may fall.",
        *_CLIP_LOW,
        ge=0,
    )
    clip_high: float = key(
        0.2,
        "Upper clip range of the ratio (1 + this); dppo: how far a probability may rise.",
        *_CLIP_HIGH,
        ge=0,
    )
    dual_clip: float | None = key(None, "Dual-clip bound for negative advantages.", *_DUAL_CLIP, gt=1)
    log_ratio_clamp: float | None = key(None, "Clamp log-ratios to ± this.", *_LOG_RATIO_CLAMP, gt=0)
    gamma: float = key(1.0, "Discount per token (gae, reinforce_pp).", *_GAMMA, gt=0, le=1)
    lam: float = key(1.0, "GAE's lambda.", *_LAM, ge=0, le=1)
    whiten: bool = key(True, "Whiten GAE advantages over the batch's sampled tokens.", *_WHITEN)
    entropy: float = key(0.0, "Weight of the entropy bonus.", _option("loss", "entropy")[1], ge=0)
    kl: Kl = key(Kl(), "Penalty against a reference policy.")
    old_logprobs: Literal["auto", "recompute", "rollout"] = key(
        "auto",
        "Denominator of the ratio: recomputed by the learner, the engine's own, or auto: recomputed only "
        "if a batch gets more than one optimizer step or its advantages need them; with async.lag the "
        "engine's own, unless algorithm.mismatch weighs the recomputed ones.",
        _POLICY,
        _COMPARED,
    )
    mismatch: Mismatch = key(Mismatch(), "Weights where the engine differs from the learner.")


class CriticSection(Section):
    """The value model of PPO; starts as a copy of the student with a scalar head."""

    lr: float = key(1e-4, "Learning rate.", gt=0)
    warmup_steps: int = key(0, "Steps in which only the critic learns.", ge=0)
    clip: float | None = key(0.2, "Clip range of the value loss; off if null.", gt=0)
    minibatch_rows: int | None = key(
        None, "Rows of one optimizer step of the critic; unset: as the student's.", ge=1
    )
