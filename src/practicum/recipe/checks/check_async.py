"""What can't be learnt from rows that older weights sampled (rollout.lag)."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import LOSSES, loss_traits
from practicum.recipe.schema.recipe import Recipe

_WEIGH = "set algorithm.mismatch.weights to token"


def check_async(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of a recipe whose rollouts are ahead of the learner."""
    if not recipe.rollout.lag:
        return
    if recipe.is_supervised:
        found = f"{recipe.rollout.lag} with algorithm.loss supervised"
        yield RecipeError("rollout.lag", found, "0", "supervised training samples nothing")
        return
    yield from _policy_loss(recipe)
    yield from _distill(recipe)


def _policy_loss(recipe: Recipe) -> Iterator[RecipeError]:
    """A policy loss must know how likely the weights that sampled a token found it."""
    algorithm, with_lag = recipe.algorithm, f"with rollout.lag {recipe.rollout.lag}"
    if not recipe.has_policy_loss:
        return
    is_weighed = algorithm.mismatch.weights != "off"
    if not loss_traits(algorithm.loss).ratio and not is_weighed:
        names = ", ".join(name for name, traits in LOSSES.items() if traits.ratio)
        advice = f"it takes every token for one that the weights of now would sample: use one of {names}"
        found = f"{algorithm.loss} {with_lag}"
        yield RecipeError(
            "algorithm.loss", found, "a loss that weighs stale tokens", f"{advice}; or {_WEIGH}"
        )
    elif algorithm.old_logprobs == "recompute" and not is_weighed:
        found = f"recompute {with_lag} and algorithm.mismatch.weights off"
        advice = f"a ratio to the weights of now does not tell who sampled: {_WEIGH} (decoupled PPO)"
        yield RecipeError("algorithm.old_logprobs", found, "auto or rollout, or weights", advice)
    if recipe.cuts_sampling:
        found = f"top_p, top_k or min_p {with_lag}"
        advice = "the engine's logprobs, by which stale tokens are weighed, are those of the cut distribution"
        yield RecipeError("rollout", found, "the student's whole distribution", advice)
    needs_student = algorithm.kl.place == "reward" or recipe.distils_by_policy
    if needs_student and algorithm.old_logprobs == "rollout":
        found = f"rollout {with_lag} and a KL in the advantages"
        advice = "the KL is of the student of now: the engine's logprobs are of older weights"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", advice)


def _distill(recipe: Recipe) -> Iterator[RecipeError]:
    distill = recipe.distill
    if distill is not None and recipe.distils_by_loss and distill.signal == "sampled":
        found = f"sampled with rollout.lag {recipe.rollout.lag} and distill.through loss"
        advice = (
            "an estimate from one token is of the weights that sampled it: use top_k or full, whose "
            f"divergence is of the student of now, or through advantage and {_WEIGH}"
        )
        yield RecipeError("distill.signal", found, "top_k or full", advice)
    for name, teacher in recipe.teachers.items():
        if teacher.student is not None and teacher.student.every and teacher.scores_during_rollout:
            found = f"a copy of the student with resources of its own and rollout.lag {recipe.rollout.lag}"
            advice = "it would score rows before the step whose weights it has to be"
            yield RecipeError(f"teachers.{name}.placement", found, "colocated, or student.every: 0", advice)
