"""Check distillation: which divergence works with which signal, and has a gradient from the teacher."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ON_DISTRIBUTIONS, ON_SAMPLED, ON_TOP_K, estimator_traits
from practicum.recipe.schema.recipe import Recipe

AS_REWARD = ("k1", "k2", "k3")
"""Divergences whose negative value can be a token's advantage or reward."""

_SHARED_BY_LOSS = "tokens that both do not have are left out of a loss: use apply_as loss, with k1_straight"
_PLAIN = {"k1_straight": "k1", "k3_straight": "k3"}


def check_distill(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the distill section."""
    distill = recipe.distill
    if distill is None:
        return
    way = (distill.divergence, distill.signal, distill.apply_as)
    found = f"{distill.divergence} with signal {distill.signal} and apply_as {distill.apply_as}"
    if reason := why_unfit(*way):
        yield RecipeError("distill.divergence", found, "a divergence that fits signal and apply_as", reason)
    elif reason := why_dead(*way):
        expected = "a divergence whose gradient depends on the teacher"
        yield RecipeError("distill.divergence", found, expected, reason)
    if distill.divergence in ON_TOP_K and recipe.cuts_sampling:
        found = f"{distill.divergence} with responses from a truncated distribution"
        expected = "rollout.top_p 1 and rollout.top_k 0"
        advice = "truncated sampling biases it: sample from all tokens, or use reverse_kl"
        yield RecipeError("distill.divergence", found, expected, advice)
    advantage = recipe.algorithm.advantage
    is_judged = recipe.reward.weight != 0 or distill.apply_as != "reward"
    if estimator_traits(advantage).greedy_baseline and not is_judged:
        found = f"{advantage} with reward.weight 0 and distill.apply_as reward"
        advice = "its baseline is the reward of a greedy response, and no reward is computed"
        yield RecipeError("algorithm.advantage", found, "another estimator, or a reward", advice)
    sampled, compared = recipe.rollout.temperature, recipe.compare_temperature
    if recipe.distils_by_policy and compared != sampled:
        found = f"{compared:g} with rollout.temperature {sampled:g} and apply_as {distill.apply_as}"
        advice = "an advantage or reward must be of the sampling policy: remove it, or set apply_as: loss"
        yield RecipeError("distill.temperature", found, "unset, or rollout.temperature", advice)
    yield from _support(recipe)
    remote = next((name for name, teacher in recipe.teachers.items() if teacher.url is not None), None)
    if remote is not None and distill.signal == "full":
        advice = "a server returns no hidden states: set distill.signal to top_k or sampled"
        yield RecipeError("distill.signal", f"full with the URL of {remote}", "top_k or sampled", advice)
    if remote is not None and compared != 1:
        key = "distill.temperature" if distill.apply_as == "loss" else "rollout.temperature"
        path = "distill.temperature" if distill.temperature is not None else "rollout.temperature"
        found, advice = f"{compared:g} with the URL of {remote}", f"a server scores at 1: set {key}: 1.0"
        yield RecipeError(path, found, "a comparison at temperature 1", advice)


def _support(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield what can't be had of comparisons at the student's most likely tokens."""
    distill = recipe.distill
    assert distill is not None
    found, sampled = f"{distill.signal}, {distill.divergence}", "sampled"
    if distill.signal == "shared":
        sampled = "shared with divergence k1_straight"
        if recipe.agent.loop != "single_turn":
            advice = "tools and templates insert tokens that another tokenizer can't be given"
            yield RecipeError(
                "distill.signal", f"shared with agent.loop {recipe.agent.loop}", "single_turn", advice
            )
        if recipe.route.balanced_by == "sigma":
            advice = "its spread is over all sampled tokens: set another route.balance"
            yield RecipeError("route.balance", "sigma with distill.signal shared", "another balance", advice)
    if not distill.of_student:
        return
    if not recipe.rollout.engine_traits.given_tokens:
        advice = f"rollout.engine {recipe.rollout.engine} does not report its most likely tokens: use torch"
        yield RecipeError("distill.signal", found, f"top_k or {sampled}", advice)
    for name, teacher in recipe.teachers.items():
        if teacher.url is not None or not teacher.engine_traits.given_tokens:
            where = "a server" if teacher.url is not None else f"engine {teacher.engine}"
            advice = f"teacher {name} is on {where}, which can't score given tokens: compare sampled ones"
            yield RecipeError("distill.signal", found, sampled, advice)


def why_unfit(divergence: str, signal: str, through: str) -> str | None:
    """Return why a divergence can't be used with this signal and apply_as, and an alternative, or None."""
    of_one = (
        f"{divergence} reads only the sampled token's logprob and would ignore signal {signal}: "
        "use signal sampled"
    )
    if through != "loss":  # the negative estimate is a token's advantage or reward
        if plain := _PLAIN.get(divergence):
            also = "" if signal == "sampled" else " with signal sampled"
            return f"{divergence} differs from {plain} only in its unused gradient: use {plain}{also}"
        if divergence in {*ON_DISTRIBUTIONS, *ON_TOP_K, *ON_SAMPLED} - {*AS_REWARD}:
            return (
                f"apply_as {through} needs an estimate of the reverse KL at each sampled token, not "
                f"{divergence}: use k1, k2 or k3 with signal sampled"
            )
        return None if signal == "sampled" else of_one if signal != "shared" else _SHARED_BY_LOSS
    if divergence in ON_TOP_K and signal != "top_k":
        also = "signal full needs no correction: use reverse_kl" if signal == "full" else "use signal top_k"
        return f"{divergence} corrects the bias of a top-k: {also}"
    if divergence in ON_DISTRIBUTIONS and signal == "sampled":
        also = ", or k1_straight, which has the gradient of the reverse KL, on average"
        return (
            f"{divergence} compares distributions, and signal sampled has the logprob of one token: "
            f"use signal top_k or full{also if divergence == 'reverse_kl' else ''}"
        )
    if divergence in ON_SAMPLED and signal not in ("sampled", "shared"):
        return f"{of_one}, or divergence reverse_kl, forward_kl or jsd"
    return None


def why_dead(divergence: str, signal: str, through: str) -> str | None:
    """Return why this combination's gradient can't depend on the teacher, or None if it can."""
    if divergence != "k1" or signal not in ("sampled", "shared") or through != "loss":
        return None
    return f"{why_k1_is_dead('teacher')}; use k1_straight, or k1 with apply_as advantage"


def why_k1_is_dead(other: str) -> str:
    """Return why k1 has no gradient from the teacher or the reference."""
    return f"the gradient of k1 = log student - log {other} does not depend on the {other}"
