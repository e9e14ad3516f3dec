"""Corrections of the train/rollout mismatch that can't be made, or that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.rules import unread
from practicum.recipe.derived import corrects_mismatch, cuts_sampling, has_policy_loss, is_supervised
from practicum.recipe.schema.recipe import Recipe

_PATH = "algorithm.mismatch"
_OFF = "weights: off and no reject"


def check_mismatch(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of algorithm.mismatch."""
    mismatch = recipe.algorithm.mismatch
    if mismatch.weights == "off":
        keys, advice = ("outside", "cap", "floor"), "set algorithm.mismatch.weights to token or sequence"
        yield from unread(mismatch, _PATH, keys, "with algorithm.mismatch.weights off", advice)
    elif mismatch.outside == "truncate":
        why, advice = "with algorithm.mismatch.outside truncate", "only outside: mask has a lower bound"
        yield from unread(mismatch, _PATH, ("floor",), why, advice)
    if not corrects_mismatch(recipe):
        return
    if not has_policy_loss(recipe):
        advice = "demonstrations are sampled by no engine: remove it"
        if not is_supervised(recipe):
            advice = "the weights are of the policy loss alone: remove it, or set reward.weight"
        yield RecipeError(_PATH, "a correction without a policy loss", _OFF, advice)
        return
    if recipe.algorithm.old_logprobs == "rollout":
        advice = "the ratio to the engine's logprobs corrects the mismatch already: choose one of the two"
        yield RecipeError(_PATH, "a correction with algorithm.old_logprobs rollout", _OFF, advice)
    if cuts_sampling(recipe):
        advice = "the engine's logprobs are those of the cut distribution, the learner's are not"
        yield RecipeError(_PATH, "a correction with top_p, top_k or min_p", _OFF, advice)
