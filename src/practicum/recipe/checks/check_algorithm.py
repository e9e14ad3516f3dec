"""Algorithms that can't work: estimator and loss, critic, groups, KL penalty, mismatch, weights of 0, lag."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES, estimator_traits, loss_traits
from practicum.recipe.checks.divergences import why_k1_is_dead
from practicum.recipe.schema.algorithm_sections import KL_HORIZON, Algorithm
from practicum.recipe.schema.recipe import Recipe

_CUT = "the engine's logprobs are those of the cut distribution, the learner's are not"
_CORRECTED = "the ratio to the engine's logprobs corrects the mismatch already: choose one of the two"
_WEIGH = "set algorithm.mismatch.weights to token"


def check_algorithm(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of how the student learns from responses."""
    algorithm, estimates = recipe.algorithm, recipe.has_advantage_estimator
    advantage, loss = algorithm.advantage, algorithm.loss
    if loss == "supervised" and advantage != "none":
        advice = "demonstrations have no advantage: set algorithm.advantage to none, or another loss"
        found = f"{advantage} with algorithm.loss supervised"
        yield RecipeError("algorithm.advantage", found, "none", advice)
    elif advantage == "none" and estimates:
        advice = "a policy loss needs an advantage; only algorithm.loss supervised needs none"
        found = f"none with algorithm.loss {loss}"
        yield RecipeError("algorithm.advantage", found, "an estimator such as grpo", advice)
    if algorithm.clip_low >= 1 and loss_traits(loss).clips_ratio:
        found = f"{algorithm.clip_low:g} with algorithm.loss {loss}"
        advice = "the ratio is clipped to 1 - clip_low and is never below 0: nothing would be clipped"
        yield RecipeError("algorithm.clip_low", found, "less than 1, such as 0.2", advice)
    yield from _kl(algorithm, recipe.counts.sessions)
    yield from _sampling(algorithm, is_cut=recipe.cuts_sampling, has_policy_loss=recipe.has_policy_loss)
    yield from _estimator(recipe, estimates)
    if recipe.reward.weight == 0 and not recipe.is_supervised:
        if recipe.distill is None:
            advice = "nothing is left to learn from: raise it, or add teachers and distill"
            yield RecipeError("reward.weight", "0 without distill", "greater than 0", advice)
        elif algorithm.kl.place == "reward" and not estimates:
            found = f"reward with reward.weight 0 and distill.apply_as {recipe.distill.apply_as}"
            yield RecipeError("algorithm.kl.place", found, "loss or off", "no reward is learnt from then")
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
        expected = "a start greater than 0 (adaptation multiplies it)"
        yield RecipeError("algorithm.kl.coefficient", "0 with a target", expected)
    if kl.target is not None and 0.2 * sessions >= KL_HORIZON:
        found = f"an adaptive weight with {sessions} sessions per step"
        advice = "one step could take the weight to zero or below"
        yield RecipeError("algorithm.kl.target", found, f"fewer than {5 * KL_HORIZON} sessions", advice)
    if kl.place == "loss" and kl.estimator == "k1":
        expected = "an estimator whose gradient depends on the reference"
        advice = f"{why_k1_is_dead('reference')}; use k2 or k3, or k1 with algorithm.kl.place reward"
        yield RecipeError("algorithm.kl.estimator", "k1 with algorithm.kl.place loss", expected, advice)


def _sampling(algorithm: Algorithm, *, is_cut: bool, has_policy_loss: bool) -> Iterator[RecipeError]:
    """Yield losses and logprobs that do not fit the distribution that rollouts are sampled from."""
    if is_cut and algorithm.old_logprobs == "rollout":
        found = "rollout with top_p or top_k"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", _CUT)
    if not has_policy_loss or not loss_traits(algorithm.loss).to_sampler:
        return
    if algorithm.old_logprobs == "recompute":
        found = f"recompute with algorithm.loss {algorithm.loss}"
        yield RecipeError("algorithm.old_logprobs", found, "auto", "its ratio is to the policy that sampled")
    if is_cut:
        found = f"{algorithm.loss} with top_p or top_k"
        yield RecipeError("algorithm.loss", found, "another loss, or nothing that is cut", _CUT)


def _estimator(recipe: Recipe, estimates: bool) -> Iterator[RecipeError]:
    """Yield what the advantage estimator lacks, and refills that it does not need."""
    critic, steps, refills = recipe.critic, recipe.train.steps, recipe.refills
    with_advantage = f"with algorithm.advantage {recipe.algorithm.advantage}"
    traits = estimator_traits(recipe.algorithm.advantage)
    if estimates and traits.critic and critic is None:
        advice = "add critic: {} for one with the defaults"
        yield RecipeError("critic", f"no critic {with_advantage}", "a critic", advice)
    elif estimates and traits.critic and critic is not None and 0 < steps <= critic.warmup_steps:
        found, advice = f"{critic.warmup_steps} of {steps} steps", "the student would never learn"
        yield RecipeError("critic.warmup_steps", found, "less than train.steps", advice)
    if estimates and traits.compares_groups and recipe.rollout.samples < 2:
        advice = "it compares the sessions of a prompt: a group of one has no relative signal"
        found = f"{recipe.rollout.samples} {with_advantage}"
        yield RecipeError("rollout.samples", found, "at least 2", advice)
    if refills and recipe.reward.weight == 0:
        advice = "groups are flat in rewards, and none is learnt from"
        yield RecipeError("refills", f"{refills} with reward.weight 0", "0", advice)
    elif refills and not traits.compares_groups:
        names = sorted(name for name, known in ESTIMATORS.items() if known.compares_groups)
        advice = f"only {', '.join(names)} learn nothing from equal rewards"
        yield RecipeError("refills", f"{refills} {with_advantage}", "0, or a group estimator", advice)


def _mismatch(algorithm: Algorithm, recipe: Recipe) -> Iterator[RecipeError]:
    """Yield corrections of the difference between engine and learner that can't be made."""
    founds = {_CUT: "top_p or top_k"} if recipe.cuts_sampling else {}
    if not recipe.has_policy_loss and recipe.is_supervised:
        founds = {"demonstrations are sampled by no engine: remove it": "algorithm.loss supervised"}
    elif not recipe.has_policy_loss:
        founds = {"weights are of the policy loss alone: remove it, or set reward.weight": "no policy loss"}
    elif algorithm.old_logprobs == "rollout":
        founds[_CORRECTED] = "algorithm.old_logprobs rollout"
    elif loss_traits(algorithm.loss).to_sampler:
        founds[_CORRECTED] = f"algorithm.loss {algorithm.loss}"
    for advice, found in founds.items():
        yield RecipeError("algorithm.mismatch", f"a correction with {found}", "weights: off", advice)


def _lag(recipe: Recipe, lag: int) -> Iterator[RecipeError]:
    """Yield what can't be learnt from rows that older weights sampled."""
    algorithm, with_lag = recipe.algorithm, f"with rollout.lag {lag}"
    if recipe.is_supervised:
        found = f"{lag} with algorithm.loss supervised"
        yield RecipeError("rollout.lag", found, "0", "supervised training samples nothing")
        return
    # A policy loss must know how likely the weights that sampled a token found it.
    weighs = not recipe.has_policy_loss or algorithm.mismatch.weights != "off"
    if not weighs and not loss_traits(algorithm.loss).ratio:
        names = ", ".join(name for name, traits in LOSSES.items() if traits.ratio)
        advice = f"it treats every token as one that the current weights would sample: use one of {names}"
        found, expected = f"{algorithm.loss} {with_lag}", "a loss that weighs stale tokens"
        yield RecipeError("algorithm.loss", found, expected, f"{advice}; or {_WEIGH}")
    elif not weighs and algorithm.old_logprobs == "recompute":
        found = f"recompute {with_lag} and algorithm.mismatch.weights off"
        advice = f"a ratio to the current weights is wrong for stale samples: {_WEIGH} (decoupled PPO)"
        yield RecipeError("algorithm.old_logprobs", found, "auto or rollout, or weights", advice)
    if recipe.has_policy_loss and recipe.cuts_sampling:
        advice = "stale tokens are weighed by the engine's logprobs, which are of the cut distribution"
        yield RecipeError("rollout", f"top_p or top_k {with_lag}", "the student's whole distribution", advice)
    needs_student = recipe.has_policy_loss and (algorithm.kl.place == "reward" or recipe.distils_by_policy)
    if needs_student and algorithm.old_logprobs == "rollout":
        found = f"rollout {with_lag} and a KL in the advantages"
        advice = "the KL is of the current student: the engine's logprobs are of older weights"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", advice)
    distill = recipe.distill
    if recipe.distils_by_loss and distill and not (distill.compares_top or distill.signal == "full"):
        found = f"sampled tokens {with_lag} and distill.apply_as loss"
        advice = (
            "an estimate from one token is of the weights that sampled it: use top_k or full, whose "
            f"divergence is of the current student, or through advantage and {_WEIGH}"
        )
        yield RecipeError("distill.signal", found, "top_k or full", advice)
    for name, teacher in recipe.teachers.items():
        if teacher.student is not None and teacher.student.every and teacher.scores_during_rollout:
            found = f"a copy of the student in its own process {with_lag}"
            advice = "it would score rows before the step whose weights it has to be"
            yield RecipeError(f"teachers.{name}.placement", found, "colocated, or student.every: 0", advice)
