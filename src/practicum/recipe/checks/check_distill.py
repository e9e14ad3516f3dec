"""Ways to learn from teachers that can't work, or whose gradient would not depend on them."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS
from practicum.recipe.checks.divergences import why_dead, why_unfit
from practicum.recipe.checks.rules import unread
from practicum.recipe.derived import compare_temperature, distils_by_policy
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Distill


def check_distill(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the distill section."""
    distill = recipe.distill
    if distill is None:
        return
    yield from _pair(distill)
    if distill.signal != "top_k":
        why = f"with distill.signal {distill.signal}"
        yield from unread(distill, "distill", ("top_k",), why, "only distill.signal top_k reads it")
    if distill.divergence != "jsd":
        why = f"with distill.divergence {distill.divergence}"
        yield from unread(distill, "distill", ("beta",), why, "only distill.divergence jsd reads it")
    baseline = ESTIMATORS[recipe.algorithm.advantage].greedy_baseline
    if distill.through == "reward" and recipe.reward.weight == 0 and baseline:
        yield RecipeError(
            "algorithm.advantage",
            f"{recipe.algorithm.advantage} with reward.weight 0 and distill.through reward",
            "another estimator, or a reward",
            "its baseline is the reward of a greedy answer, and nothing is judged here",
        )
    yield from _temperature(recipe, distill)
    yield from _servers(recipe, distill)


def _pair(distill: Distill) -> Iterator[RecipeError]:
    way = (distill.divergence, distill.signal, distill.through)
    found = f"{distill.divergence} with signal {distill.signal}, through {distill.through}"
    if reason := why_unfit(*way):
        yield RecipeError("distill.divergence", found, "a divergence that fits signal and through", reason)
    elif reason := why_dead(*way):
        expected = "a divergence whose gradient depends on the teacher"
        yield RecipeError("distill.divergence", found, expected, reason)


def _temperature(recipe: Recipe, distill: Distill) -> Iterator[RecipeError]:
    sampled = recipe.rollout.temperature
    if distils_by_policy(recipe) and compare_temperature(recipe) != sampled:
        yield RecipeError(
            "distill.temperature",
            f"{distill.temperature:g} with rollout.temperature {sampled:g} and through {distill.through}",
            "unset, or rollout.temperature",
            "an advantage or reward is of the policy that sampled: remove it, or set distill.through: loss",
        )


def _servers(recipe: Recipe, distill: Distill) -> Iterator[RecipeError]:
    remote = [name for name, teacher in recipe.teachers.items() if teacher.url is not None]
    if not remote:
        return
    who = f"the teacher {remote[0]} behind a URL"
    if distill.signal == "full":
        advice = (
            "a server gives no hidden states: set distill.signal to top_k or sampled, or load the model here"
        )
        yield RecipeError("distill.signal", f"full with {who}", "top_k or sampled", advice)
    temperature = compare_temperature(recipe)
    if temperature != 1:
        key = "rollout.temperature" if distils_by_policy(recipe) else "distill.temperature"
        path = "distill.temperature" if distill.temperature is not None else "rollout.temperature"
        advice = f"a server scores prompts at temperature 1: set {key}: 1.0"
        yield RecipeError(path, f"{temperature:g} with {who}", "a comparison at temperature 1", advice)
