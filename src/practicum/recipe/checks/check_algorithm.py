"""Algorithms that can't work: estimator and loss, critic, groups, KL penalty, mismatch, weights of 0."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, estimator_traits, loss_traits
from practicum.recipe.checks.divergences import why_k1_is_dead
from practicum.recipe.counts import count
from practicum.recipe.schema.algorithm_sections import KL_HORIZON
from practicum.recipe.schema.recipe import Recipe

_CUT = "the engine's logprobs are those of the cut distribution, the learner's are not"
_CORRECTED = "the ratio to the engine's logprobs corrects the mismatch already: choose one of the two"


def check_algorithm(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of what is learnt from an answer."""
    for check in (_pair, _to_sampler, _clip, _kl, _critic, _groups, _reward_weight, _mismatch):
        yield from check(recipe)


def _pair(recipe: Recipe) -> Iterator[RecipeError]:
    algorithm = recipe.algorithm
    advantage, loss = algorithm.advantage, algorithm.loss
    if loss == "supervised" and advantage != "none":
        yield RecipeError(
            "algorithm.advantage",
            f"{advantage} with algorithm.loss supervised",
            "none",
            "demonstrations have no advantage: set algorithm.advantage to none, or another loss",
        )
    elif advantage == "none" and recipe.has_advantage_estimator:
        yield RecipeError(
            "algorithm.advantage",
            f"none with algorithm.loss {loss}",
            "an estimator such as grpo",
            "a policy loss needs an advantage; only algorithm.loss supervised needs none",
        )


def _to_sampler(recipe: Recipe) -> Iterator[RecipeError]:
    loss = recipe.algorithm.loss
    if not recipe.has_policy_loss or not loss_traits(loss).to_sampler:
        return
    if recipe.algorithm.old_logprobs == "recompute":
        found = f"recompute with algorithm.loss {loss}"
        yield RecipeError("algorithm.old_logprobs", found, "auto", "its ratio is to the policy that sampled")
    if recipe.cuts_sampling:
        found = f"{loss} with top_p, top_k or min_p"
        yield RecipeError("algorithm.loss", found, "another loss, or nothing that is cut", _CUT)


def _clip(recipe: Recipe) -> Iterator[RecipeError]:
    algorithm = recipe.algorithm
    if algorithm.clip_low >= 1 and loss_traits(algorithm.loss).clips_ratio:
        yield RecipeError(
            "algorithm.clip_low",
            f"{algorithm.clip_low:g} with algorithm.loss {algorithm.loss}",
            "less than 1, such as 0.2",
            "the ratio is clipped to 1 - clip_low and is never below 0: nothing would be clipped",
        )


def _kl(recipe: Recipe) -> Iterator[RecipeError]:
    kl = recipe.algorithm.kl
    if recipe.algorithm.loss == "supervised" and kl.place != "off":
        found = f"{kl.place} with algorithm.loss supervised"
        yield RecipeError("algorithm.kl.place", found, "off", "supervised training has no KL term")
    if kl.target is not None and kl.place == "reward" and kl.coefficient == 0:
        found = "0 with a target"
        expected = "a start greater than 0 (adaptation multiplies it)"
        yield RecipeError("algorithm.kl.coefficient", found, expected)
    if kl.target is not None and 0.2 * count(recipe).sessions >= KL_HORIZON:
        found = f"an adaptive weight with {count(recipe).sessions} sessions per step"
        advice = "one step could take the weight to zero or below"
        yield RecipeError("algorithm.kl.target", found, f"fewer than {5 * KL_HORIZON} sessions", advice)
    if recipe.algorithm.old_logprobs == "rollout" and recipe.cuts_sampling:
        found = "rollout with top_p, top_k or min_p"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", _CUT)
    if kl.place == "loss" and kl.estimator == "k1":
        expected = "an estimator whose gradient depends on the reference"
        advice = f"{why_k1_is_dead('reference')}; use k2 or k3, or k1 with algorithm.kl.place reward"
        yield RecipeError("algorithm.kl.estimator", "k1 with algorithm.kl.place loss", expected, advice)


def _critic(recipe: Recipe) -> Iterator[RecipeError]:
    advantage, critic = recipe.algorithm.advantage, recipe.critic
    if not estimator_traits(advantage).critic or not recipe.has_advantage_estimator:
        return
    if critic is None:
        found = f"no critic with algorithm.advantage {advantage}"
        yield RecipeError("critic", found, "a critic", "add critic: {} for one with the defaults")
    elif 0 < recipe.train.steps <= critic.warmup_steps:
        found = f"{critic.warmup_steps} of {recipe.train.steps} steps"
        advice = "the student would never learn"
        yield RecipeError("critic.warmup_steps", found, "less than train.steps", advice)


def _groups(recipe: Recipe) -> Iterator[RecipeError]:
    advantage, samples = recipe.algorithm.advantage, recipe.rollout.samples
    compares = estimator_traits(advantage).compares_groups
    if compares and samples < 2 and recipe.has_advantage_estimator:
        yield RecipeError(
            "rollout.samples",
            f"{samples} with algorithm.advantage {advantage}",
            "at least 2",
            "it compares the sessions of a prompt: a group of one has no relative signal",
        )
    if recipe.buffer.filter_flat_groups and recipe.reward.weight and not compares:
        names = sorted(name for name, traits in ESTIMATORS.items() if traits.compares_groups)
        yield RecipeError(
            "buffer.filter_flat_groups",
            f"true with algorithm.advantage {advantage}",
            "false, or a group estimator",
            f"only {', '.join(names)} learn nothing from equal rewards",
        )


def _reward_weight(recipe: Recipe) -> Iterator[RecipeError]:
    """A weight of 0: something else must be learnt from, and nothing may count on rewards."""
    distill = recipe.distill
    if recipe.is_supervised or recipe.reward.weight:
        return
    if distill is None:
        advice = "nothing is left to learn from: raise it, or add teachers and distill"
        yield RecipeError("reward.weight", "0 without distill", "greater than 0", advice)
        return
    if recipe.algorithm.kl.place == "reward" and not recipe.has_advantage_estimator:
        found = f"reward with reward.weight 0 and distill.through {distill.through}"
        yield RecipeError("algorithm.kl.place", found, "loss or off", "no reward is learnt from then")
    if recipe.buffer.filter_flat_groups:
        found = "true with reward.weight 0"
        advice = "groups are flat in rewards, and none is learnt from"
        yield RecipeError("buffer.filter_flat_groups", found, "false", advice)


def _mismatch(recipe: Recipe) -> Iterator[RecipeError]:
    """Corrections of the difference between engine and learner that can't be made."""
    path, expected = "algorithm.mismatch", "weights: off"
    if not recipe.corrects_mismatch:
        return
    if not recipe.has_policy_loss:
        advice = "demonstrations are sampled by no engine: remove it"
        if not recipe.is_supervised:
            advice = "the weights are of the policy loss alone: remove it, or set reward.weight"
        yield RecipeError(path, "a correction without a policy loss", expected, advice)
        return
    if recipe.algorithm.old_logprobs == "rollout":
        yield RecipeError(path, "a correction with algorithm.old_logprobs rollout", expected, _CORRECTED)
    elif loss_traits(recipe.algorithm.loss).to_sampler:
        found = f"a correction with algorithm.loss {recipe.algorithm.loss}"
        yield RecipeError(path, found, expected, _CORRECTED)
    if recipe.cuts_sampling:
        yield RecipeError(path, "a correction with top_p, top_k or min_p", expected, _CUT)
