"""The one table of stages: each with its role, the fields it reads and writes, and who runs it.

A stage is a line here and a method of its role that is decorated with `@stage`; a recipe's `stages` add the
user's. Imports no torch: `practicum explain` and `practicum check` draw the plan without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from practicum.dataplane.own_stage import OwnStage
from practicum.dataplane.stages import Plan, StageSpec, check_sides, resolve
from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import estimator_traits, loss_traits
from practicum.recipe.counts import count
from practicum.recipe.derived import (
    Traits,
    corrects_mismatch,
    cuts_sampling,
    data_parallel,
    distils_by_loss,
    distils_by_policy,
    has_advantage_estimator,
    has_policy_loss,
    is_supervised,
    lag,
    model_traits,
    scores_during_rollout,
    uses_reward,
)
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.recipe import Recipe

OldSource = Literal["own", "old_logprobs", "rollout_logprobs"]

_TOKENS = ("prompt_ids", "response_ids")
_ROWS = (*_TOKENS, "response_mask")
VISION_FIELDS = ("position_ids", "multi_modal_inputs")
"""Further fields of the rows of vision models."""
_REWARD = StageSpec(
    "reward",
    _ROWS,
    ("reward", "reward_tokens"),
    "reward",
    "controller",
    about="judge each session",
    side="sampling",
)


def make_plan(recipe: Recipe, traits: Traits | None = None) -> Plan:
    """The plan of a recipe; a stage that would read what nobody writes is a RecipeError.

    `traits` are the student's, if more is known than `model_traits` can find out.
    """
    traits = model_traits(recipe.model) if traits is None else traits
    plan = resolve(all_stages(recipe, traits), _why_unread(recipe))
    check_sides(plan := replace(plan, counts=count(recipe), lag=lag(recipe)))
    return plan


def ratio_source(recipe: Recipe) -> OldSource:
    """Where the denominator of the policy loss's ratio comes from.

    own: the update's own logprobs, detached, are the old ones; nothing is stored for them.
    """
    algorithm, train = recipe.algorithm, recipe.train
    if not _has_ratio(recipe):
        return "own"
    if algorithm.old_logprobs == "rollout" or loss_traits(algorithm.loss).to_sampler:
        return "rollout_logprobs"
    if algorithm.old_logprobs == "auto" and lag(recipe) and algorithm.mismatch.weights == "off":
        return "rollout_logprobs"
    several = train.epochs * train.minibatches > 1 or train.minibatch_rows is not None
    if algorithm.old_logprobs == "recompute" or several or _advantages_need_old(recipe):
        return "old_logprobs"
    return "own"


def student_source(recipe: Recipe) -> Literal["old_logprobs", "rollout_logprobs"]:
    """Where the student's logprobs come from that the advantages are made with, if they need any."""
    return "rollout_logprobs" if recipe.algorithm.old_logprobs == "rollout" else "old_logprobs"


def compares_sampled(recipe: Recipe) -> bool:
    """Whether engine and learner are compared at the sampling temperature: not if the engine's numbers are
    those of a distribution that was cut, and at temperature 1 there is no difference."""
    return recipe.rollout.temperature != 1 and not cuts_sampling(recipe) and not is_supervised(recipe)


def all_stages(recipe: Recipe, traits: Traits) -> list[StageSpec]:
    """Every stage there is, in order, with this recipe's reads and writes."""
    estimator = recipe.algorithm.advantage
    critic, supervised = estimator_traits(estimator).critic, is_supervised(recipe)
    loss = f"algorithm.loss is {recipe.algorithm.loss}"
    vision = VISION_FIELDS if traits.vision else ()
    images = ("multi_modal_inputs",) if traits.vision else ()
    experts = ("routed_experts",) if replays(recipe, traits) else ()
    tokens = (*_TOKENS, *vision)
    stages = [
        StageSpec(
            "demonstrate",
            (),
            (*_ROWS, *vision),
            "rollout",
            "controller",
            about="a demonstrator's turns",
            side="sampling",
            not_asked="" if supervised else f"{loss}: the student's own answers are the batch",
        ),
        StageSpec(
            "rollout",
            (),
            (*_ROWS, "rollout_logprobs", "plain_logprobs", *vision, *experts),
            "rollout",
            "controller",
            about="the student answers",
            side="sampling",
            not_asked=f"{loss}: demonstrations are the batch" if supervised else "",
        ),
        replace(_REWARD, effect=recipe.reward.watch),
        StageSpec(
            "teachers",
            (*_TOKENS, *images),
            _teacher_writes(recipe),
            "teachers",
            about="the teachers score each answer",
            # Colocated ones share the learner's devices, and so its time.
            side="sampling" if all(map(scores_during_rollout, recipe.teachers.values())) else "learning",
        ),
        StageSpec(
            "pad",
            role="padding",
            ranks="first",
            effect=True,
            about="fill the batch up with rows that do nothing",
            not_asked=_why_no_padding(recipe),
        ),
        StageSpec(
            "old_logprobs",
            (*tokens, *experts),
            ("old_logprobs",),
            "student",
            about="the student before the update",
        ),
        StageSpec("ref_logprobs", tokens, ("ref_logprobs",), "student", about="the reference policy"),
        StageSpec("values", tokens, ("values",), "critic", about="what the critic expects"),
        StageSpec(
            "advantages",
            _advantage_reads(recipe),
            ("advantages", "returns") if critic else ("advantages",),
            "advantages",
            "first",
            about=f"what each token was worth ({_advantage_text(recipe)})",
        ),
        StageSpec(
            "update_critic",
            (*_ROWS, *(("values", "returns") if critic else ()), *vision),
            (),
            "critic",
            effect=True,
            about="value loss",
            not_asked="" if critic else f"algorithm.advantage {estimator} has no critic",
        ),
        StageSpec(
            "update_student",
            (*_update_reads(recipe), *vision, *experts),
            (),
            "student",
            effect=True,
            about=_loss_text(recipe),
        ),
        StageSpec(
            "sync",
            role="sync",
            ranks="controller",
            effect=True,
            about="the new weights are kept for the engines"
            if lag(recipe)
            else "the engine takes the new weights",
        ),
        StageSpec("clear", role="step", ranks="controller", effect=True, about="the store forgets the step"),
    ]
    for use in recipe.stages:
        own = find_part("stage", use, of=OwnStage)
        _insert(stages, own.spec(use), own.after)
    return stages


def _insert(stages: list[StageSpec], spec: StageSpec, after: str) -> None:
    """Put a stage of the user's among the learner's."""
    names = [stage.name for stage in stages]
    allowed = names[names.index("pad") : names.index("sync")]
    if after not in allowed:
        found = f"{spec.use!r}, which comes after {after!r}"
        raise RecipeError("stages", found, f"a stage that comes after one of {', '.join(allowed)}")
    if spec.name in names:
        advice = "call its function something else"
        raise RecipeError("stages", f"{spec.use!r}, a second stage {spec.name}", "a name of its own", advice)
    stages.insert(names.index(after) + 1, spec)


def evaluation_plan() -> Plan:
    """The stages of an evaluation: answers and their rewards, nothing else."""
    rollout = StageSpec("rollout", (), _ROWS, "rollout", "controller", about="the student answers")
    return Plan((rollout, replace(_REWARD, effect=True)))


def replays(recipe: Recipe, traits: Traits) -> bool:
    """Whether the learner takes the experts that the engine took; demonstrations have none."""
    return traits.moe and recipe.train.replay_experts and not is_supervised(recipe)


def _why_no_padding(recipe: Recipe) -> str:
    """Why no batch of this recipe needs padding; empty if one may."""
    train, critic = recipe.train, recipe.critic
    if data_parallel(recipe) > 1:
        return ""
    rows = (train.minibatch_rows, critic.minibatch_rows if critic is not None else None)
    if train.minibatches > 1 or any(number is not None for number in rows):
        return ""
    return "one optimizer step on one rank takes the whole batch, of any size"


def _advantage_reads(recipe: Recipe) -> tuple[str, ...]:
    """What the advantages are made from."""
    algorithm = recipe.algorithm
    reads = ["response_mask"]
    if uses_reward(recipe):
        reads.append("reward_tokens")
    if has_advantage_estimator(recipe) and estimator_traits(algorithm.advantage).critic:
        reads.append("values")
    if algorithm.kl.place == "reward":
        reads.append("ref_logprobs")
    if distils_by_policy(recipe):
        reads.append("teacher_logprobs")
    if _advantages_need_old(recipe):
        reads.append(student_source(recipe))
    if corrects_mismatch(recipe):
        reads.append("rollout_logprobs")
    return tuple(reads)


def _teacher_writes(recipe: Recipe) -> tuple[str, ...]:
    signal = recipe.distill.signal if recipe.distill is not None else "sampled"
    more = {
        "sampled": (),
        "top_k": ("teacher_topk_ids", "teacher_topk_logprobs"),
        "full": ("teacher_hidden",),
    }
    return ("teacher_logprobs", *more[signal])


def _update_reads(recipe: Recipe) -> tuple[str, ...]:
    if is_supervised(recipe):
        return _ROWS
    reads = [*_ROWS, *(["advantages"] if has_policy_loss(recipe) else [])]
    reads.append("rollout_logprobs" if compares_sampled(recipe) else "plain_logprobs")
    if (denominator := ratio_source(recipe)) != "own":
        reads.append(denominator)
    if recipe.distill is not None:
        reads += _teacher_writes(recipe) if distils_by_loss(recipe) else ("teacher_logprobs",)
    if recipe.algorithm.kl.place == "loss":
        reads.append("ref_logprobs")
    return tuple(dict.fromkeys(reads))


def _loss_text(recipe: Recipe) -> str:
    """The student's loss in words."""
    if is_supervised(recipe):
        return "supervised"
    parts = [f"policy loss {recipe.algorithm.loss}"] if has_policy_loss(recipe) else []
    if recipe.distill is not None and distils_by_loss(recipe):
        parts.append(f"{recipe.distill.divergence} from the teachers ({recipe.distill.signal})")
    return " + ".join(parts)


def _has_ratio(recipe: Recipe) -> bool:
    return has_policy_loss(recipe) and loss_traits(recipe.algorithm.loss).ratio


def _advantages_need_old(recipe: Recipe) -> bool:
    """For a KL in the reward, teachers in it or in the advantage, and weights against the mismatch."""
    in_reward = recipe.algorithm.kl.place == "reward" or distils_by_policy(recipe)
    return in_reward or corrects_mismatch(recipe)


def _advantage_text(recipe: Recipe) -> str:
    parts = [recipe.algorithm.advantage] if has_advantage_estimator(recipe) else []
    parts += ["KL in the reward"] if recipe.algorithm.kl.place == "reward" else []
    if recipe.distill is not None and distils_by_policy(recipe):
        parts.append(f"the teachers' {recipe.distill.divergence} as {recipe.distill.through}")
    parts += ["weights against the mismatch"] if corrects_mismatch(recipe) else []
    return ", ".join(parts) or "nothing"


def _why_unread(recipe: Recipe) -> dict[str, str]:
    algorithm = recipe.algorithm
    if not has_policy_loss(recipe):
        old = "there is no policy loss"
    elif not _has_ratio(recipe):
        old = f"algorithm.loss {algorithm.loss} has no ratio"
    elif algorithm.old_logprobs == "rollout":
        old = "algorithm.old_logprobs is rollout: the engine's are used"
    elif ratio_source(recipe) == "rollout_logprobs":
        why = f"algorithm.loss is {algorithm.loss}" if not lag(recipe) else f"async.lag is {lag(recipe)}"
        old = f"{why}: the ratio is to the engine's"
    else:
        old = "a batch gets one optimizer step, whose own logprobs are the old ones"
    return {
        "old_logprobs": old,
        "ref_logprobs": f"algorithm.kl.place is {algorithm.kl.place}",
        "values": f"algorithm.advantage is {algorithm.advantage}",
        "advantages": f"algorithm.loss is {algorithm.loss}"
        if is_supervised(recipe)
        else "there is no policy loss: reward.weight is 0 and the teachers enter by the loss",
        "reward": "reward.weight is 0" if recipe.reward.weight == 0 else "demonstrations are not judged",
        "teacher_logprobs": "the recipe has no teachers" if recipe.distill is None else "",
    }
