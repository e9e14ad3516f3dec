"""Check the algorithm: estimator and loss, critic, groups, KL penalty, mismatch, zero weights, lag."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES, estimator_traits, loss_traits
from practicum.recipe.checks.divergences import why_k1_is_dead
from practicum.recipe.schema.algorithm_sections import KL_HORIZON, Algorithm
from practicum.recipe.schema.recipe import Recipe

_CUT = "the engine's logprobs are of the truncated distribution, the learner's of the full one"
_CORRECTED = "the ratio to the engine's logprobs already corrects the mismatch: use one of the two"
_WEIGH = "set algorithm.mismatch to token"


def check_algorithm(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the section algorithm."""
    algorithm, estimates = recipe.algorithm, recipe.has_advantage_estimator
    advantage, loss = algorithm.advantage, algorithm.loss
    if loss == "supervised" and advantage != "none":
        advice = "supervised training has no advantages: set algorithm.advantage to none, or use another loss"
        found = f"{advantage} with algorithm.loss supervised"
        yield RecipeError("algorithm.advantage", found, "none", advice)
    elif advantage == "none" and estimates:
        advice = "a policy loss needs an advantage; only algorithm.loss supervised needs none"
        found = f"none with algorithm.loss {loss}"
        yield RecipeError("algorithm.advantage", found, "an estimator such as grpo", advice)
    if algorithm.clip_low >= 1 and loss_traits(loss).clips_ratio:
        found = f"{algorithm.clip_low:g} with algorithm.loss {loss}"
        advice = "the ratio is never below 0, so nothing would be clipped"
        yield RecipeError("algorithm.clip_low", found, "less than 1, such as 0.2", advice)
    yield from _kl(algorithm, recipe.counts.sessions)
    yield from _sampling(algorithm, is_cut=recipe.cuts_sampling, has_policy_loss=recipe.has_policy_loss)
    yield from _estimator(recipe, estimates)
    if recipe.reward.weight == 0 and not recipe.is_supervised:
        if recipe.distill is None:
            advice = "the loss would be 0: raise the weight, or add teachers and distill"
            yield RecipeError("reward.weight", "0 without distill", "greater than 0", advice)
        elif algorithm.kl.place == "reward" and not estimates:
            found = f"reward with reward.weight 0 and distill.apply_as {recipe.distill.apply_as}"
            yield RecipeError("algorithm.kl.place", found, "loss or off", "rewards are not trained on")
    if recipe.corrects_mismatch:
        yield from _mismatch(algorithm, recipe)
    if lag := recipe.rollout.lag:
        yield from _lag(recipe, lag)


def _kl(algorithm: Algorithm, sessions: int) -> Iterator[RecipeError]:
    kl = algorithm.kl
    if algorithm.loss == "supervised" and kl.place != "off":
        found = f"{kl.place} with algorithm.loss supervised"
        yield RecipeError("algorithm.kl.place", found, "off", "supervised training has no KL term")
    if kl.target is not None and kl.place == "reward" and kl.coefficient == 0:
        expected = "an initial value greater than 0, which adaptation multiplies"
        yield RecipeError("algorithm.kl.coefficient", "0 with a target", expected)
    if kl.target is not None and 0.2 * sessions >= KL_HORIZON:
        found = f"an adaptive weight with {sessions} sessions per step"
        advice = "one step could make the weight 0 or negative"
        yield RecipeError("algorithm.kl.target", found, f"fewer than {5 * KL_HORIZON} sessions", advice)
    if kl.place == "loss" and kl.estimator == "k1":
        expected = "an estimator whose gradient depends on the reference"
        advice = f"{why_k1_is_dead('reference')}; use k2 or k3, or k1 with algorithm.kl.place reward"
        yield RecipeError("algorithm.kl.estimator", "k1 with algorithm.kl.place loss", expected, advice)


def _sampling(algorithm: Algorithm, *, is_cut: bool, has_policy_loss: bool) -> Iterator[RecipeError]:
    """Yield losses and logprobs that don't fit the sampling distribution."""
    if is_cut and algorithm.old_logprobs == "rollout":
        found = "rollout with top_p or top_k"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", _CUT)
    if not has_policy_loss or not loss_traits(algorithm.loss).to_sampler:
        return
    if algorithm.old_logprobs == "recompute":
        found = f"recompute with algorithm.loss {algorithm.loss}"
        yield RecipeError(
            "algorithm.old_logprobs", found, "auto", "its ratio is always to the policy that sampled"
        )
    if is_cut:
        found = f"{algorithm.loss} with top_p or top_k"
        yield RecipeError("algorithm.loss", found, "another loss, or top_p 1 and top_k 0", _CUT)


def _estimator(recipe: Recipe, estimates: bool) -> Iterator[RecipeError]:
    """Yield missing requirements of the advantage estimator, and refills that it can't use."""
    critic, steps, refills = recipe.critic, recipe.train.steps, recipe.refills
    with_advantage = f"with algorithm.advantage {recipe.algorithm.advantage}"
    traits = estimator_traits(recipe.algorithm.advantage)
    if estimates and traits.critic and critic is None:
        advice = "add critic: {} for a critic with the defaults"
        yield RecipeError("critic", f"no critic {with_advantage}", "a critic", advice)
    elif estimates and traits.critic and critic is not None and 0 < steps <= critic.warmup_steps:
        found, advice = f"{critic.warmup_steps} of {steps} steps", "the student would never be trained"
        yield RecipeError("critic.warmup_steps", found, "less than train.steps", advice)
    if estimates and traits.compares_groups and recipe.rollout.samples < 2:
        advice = "it compares the sessions of a prompt, so each needs several"
        found = f"{recipe.rollout.samples} {with_advantage}"
        yield RecipeError("rollout.samples", found, "at least 2", advice)
    if refills and recipe.reward.weight == 0:
        advice = "refills replace groups with equal rewards, and rewards are not trained on"
        yield RecipeError("refills", f"{refills} with reward.weight 0", "0", advice)
    elif refills and not traits.compares_groups:
        names = sorted(name for name, known in ESTIMATORS.items() if known.compares_groups)
        advice = f"only {', '.join(names)} have no gradient for equal rewards"
        yield RecipeError("refills", f"{refills} {with_advantage}", "0, or a group estimator", advice)


def _mismatch(algorithm: Algorithm, recipe: Recipe) -> Iterator[RecipeError]:
    """Yield corrections of the mismatch between engine and learner that can't be computed."""
    founds = {_CUT: "top_p or top_k"} if recipe.cuts_sampling else {}
    if not recipe.has_policy_loss and recipe.is_supervised:
        founds = {"supervised training samples nothing: remove it": "algorithm.loss supervised"}
    elif not recipe.has_policy_loss:
        founds = {"only a policy loss is weighted: remove it, or set reward.weight": "no policy loss"}
    elif algorithm.old_logprobs == "rollout":
        founds[_CORRECTED] = "algorithm.old_logprobs rollout"
    elif loss_traits(algorithm.loss).to_sampler:
        founds[_CORRECTED] = f"algorithm.loss {algorithm.loss}"
    for advice, found in founds.items():
        yield RecipeError("algorithm.mismatch", f"{algorithm.mismatch} with {found}", "off", advice)


def _lag(recipe: Recipe, lag: int) -> Iterator[RecipeError]:
    """Yield settings that can't train on rows sampled by older weights."""
    algorithm, with_lag = recipe.algorithm, f"with rollout.lag {lag}"
    if recipe.is_supervised:
        found = f"{lag} with algorithm.loss supervised"
        yield RecipeError("rollout.lag", found, "0", "supervised training samples nothing")
        return
    # A policy loss needs the probability of each token under the weights that sampled it.
    weighs = not recipe.has_policy_loss or algorithm.mismatch != "off"
    if not weighs and not loss_traits(algorithm.loss).ratio:
        names = ", ".join(name for name, traits in LOSSES.items() if traits.ratio)
        advice = f"it treats every token as sampled by the current weights: use one of {names}"
        found, expected = f"{algorithm.loss} {with_lag}", "a loss that weights stale tokens"
        yield RecipeError("algorithm.loss", found, expected, f"{advice}; or {_WEIGH}")
    elif not weighs and algorithm.old_logprobs == "recompute":
        found = f"recompute {with_lag} and algorithm.mismatch off"
        advice = f"a ratio to the current weights is wrong for stale samples: {_WEIGH} (decoupled PPO)"
        yield RecipeError("algorithm.old_logprobs", found, "auto or rollout, or weights", advice)
    if recipe.has_policy_loss and recipe.cuts_sampling:
        advice = "stale tokens are weighted by the engine's logprobs, which are of the truncated distribution"
        yield RecipeError("rollout", f"top_p or top_k {with_lag}", "top_p 1 and top_k 0", advice)
    needs_student = recipe.has_policy_loss and (algorithm.kl.place == "reward" or recipe.distils_by_policy)
    if needs_student and algorithm.old_logprobs == "rollout":
        found = f"rollout {with_lag} and a KL in the advantages"
        advice = "the KL needs logprobs of the current student, and the engine's are of older weights"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", advice)
    distill = recipe.distill
    if recipe.distils_by_loss and distill and not (distill.compares_top or distill.signal == "full"):
        found = f"sampled tokens {with_lag} and distill.apply_as loss"
        advice = (
            "an estimate from the sampled token is of the weights that sampled it: use top_k or full, "
            f"or distill.apply_as advantage and {_WEIGH}"
        )
        yield RecipeError("distill.signal", found, "top_k or full", advice)
    for name, teacher in recipe.teachers.items():
        if teacher.student is not None and teacher.student.every and teacher.scores_during_rollout:
            found = f"a copy of the student in its own process {with_lag}"
            advice = "it would score rows before the step whose weights it copies"
            yield RecipeError(f"teachers.{name}.placement", found, "colocated, or student.every: 0", advice)
