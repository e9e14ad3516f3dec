"""The table of stages, with the role, reads, writes and ranks of each.

To add a stage, write a line here and a method of its role with the decorator `@stage`. A recipe's `stages`
add custom ones. Imports no torch, because `practicum explain` and `practicum check` show the plan without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from practicum.dataplane.stages import OwnStage, Plan, StageSpec, check_sides, resolve
from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import estimator_traits, loss_traits
from practicum.recipe.derived import Traits, model_traits
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Recipe

OldSource = Literal["own", "old_logprobs", "rollout_logprobs"]

_TOKENS = ("prompt_ids", "response_ids")
_ROWS = (*_TOKENS, "response_mask")
VISION_FIELDS = ("position_ids", "multi_modal_inputs")
"""Additional fields of vision models."""

TABLE = (
    StageSpec("demonstrate", role="rollout", ranks="controller", side="sampling", about="build SFT examples"),
    StageSpec("rollout", role="rollout", ranks="controller", side="sampling", about="the student responds"),
    StageSpec(
        "reward",
        _ROWS,
        ("reward", "reward_tokens"),
        "reward",
        "controller",
        side="sampling",
        about="score each session",
    ),
    StageSpec("teachers", role="teachers", completes=True, about="the teachers score each response"),
    StageSpec("pad", role="padding", ranks="first", effect=True, completes=True, about="add padding rows"),
    StageSpec(
        "old_logprobs",
        _TOKENS,
        ("old_logprobs",),
        "student",
        about="the student's logprobs before the update",
    ),
    StageSpec("ref_logprobs", _TOKENS, ("ref_logprobs",), "student", about="the reference policy's logprobs"),
    StageSpec("values", _TOKENS, ("values",), "critic", about="the critic's values"),
    StageSpec("advantages", role="advantages", ranks="first", metrics="advantage"),
    StageSpec("update_critic", role="critic", effect=True, trains=True, metrics="critic", about="value loss"),
    StageSpec("update_student", role="student", effect=True, trains=True, metrics="train"),
    StageSpec("sync", role="sync", ranks="controller", effect=True),
    StageSpec("clear", role="rollout", ranks="controller", effect=True, about="clear the store"),
)
"""All stages, in order. `all_stages` adds the parts that depend on the recipe."""


def make_plan(recipe: Recipe, traits: Traits | None = None) -> Plan:
    """Return the plan of a recipe. Raise RecipeError if a stage reads a field that no stage writes. `traits`
    overrides the student's traits from `model_traits`."""
    traits = model_traits(recipe.model) if traits is None else traits
    plan = resolve(all_stages(recipe, traits), _why_unread(recipe))
    check_sides(plan := replace(plan, counts=recipe.counts, lag=recipe.rollout.lag))
    return plan


def evaluation_plan(lag: int = 0) -> Plan:
    """Return the plan of an evaluation, with rollout and reward."""
    table = {spec.name: spec for spec in TABLE}
    return Plan((replace(table["rollout"], writes=_ROWS), replace(table["reward"], effect=True)), lag=lag)


def ratio_source(recipe: Recipe) -> OldSource:
    """Return the source of the denominator of the policy loss's ratio. With own, the old logprobs are the
    update's detached logprobs, and none are stored."""
    algorithm, train, loss = recipe.algorithm, recipe.train, loss_traits(recipe.algorithm.loss)
    if not (recipe.has_policy_loss and loss.ratio):
        return "own"
    if algorithm.old_logprobs == "rollout" or loss.to_sampler:
        return "rollout_logprobs"
    if algorithm.old_logprobs == "auto" and recipe.rollout.lag and algorithm.mismatch == "off":
        return "rollout_logprobs"
    several = train.epochs * train.minibatches > 1 or train.minibatch_size is not None
    in_advantages = algorithm.kl.place == "reward" or recipe.distils_by_policy or recipe.corrects_mismatch
    return "old_logprobs" if algorithm.old_logprobs == "recompute" or several or in_advantages else "own"


def student_source(algorithm: Algorithm) -> Literal["old_logprobs", "rollout_logprobs"]:
    """Return the source of the student's logprobs for advantages that need them."""
    return "rollout_logprobs" if algorithm.old_logprobs == "rollout" else "old_logprobs"


def all_stages(recipe: Recipe, traits: Traits) -> list[StageSpec]:
    """Return all stages, in order, with this recipe's reads and writes."""
    algorithm, distill, lag = recipe.algorithm, recipe.distill, recipe.rollout.lag
    supervised, answered, policy = recipe.is_supervised, recipe.teachers_answer, recipe.has_policy_loss
    critic = estimator_traits(algorithm.advantage).critic
    estimates, kl, by_policy = recipe.has_advantage_estimator, algorithm.kl.place, recipe.distils_by_policy
    weighs, loss = recipe.corrects_mismatch, f"algorithm.loss is {algorithm.loss}"
    warmup = 0 if recipe.critic is None else recipe.critic.warmup_steps
    streamed = all(teacher.scores_during_rollout for teacher in recipe.teachers.values())
    replayed = traits.moe and recipe.rollout.engine_traits.reports_experts and not supervised

    vision, images = _if(traits.vision, *VISION_FIELDS), _if(traits.vision, "multi_modal_inputs")
    experts = _if(replayed, "routed_experts")
    tokens = (*_TOKENS, *vision)
    signal = "sampled" if distill is None else distill.signal
    of_student = distill is not None and distill.of_student and not supervised
    taught = (
        "teacher_logprobs",
        *_if(distill is not None and distill.compares_top, "teacher_topk_ids", "teacher_topk_logprobs"),
        *_if(signal == "shared", "teacher_match"),
        *_if(signal == "full", "teacher_hidden"),
    )
    tops = _if(of_student, "rollout_topk_ids")
    advantage_reads = (
        "response_mask",
        *_if(recipe.uses_reward, "reward_tokens"),
        *_if(estimates and critic, "values"),
        *_if(kl == "reward", "ref_logprobs"),
        *_if(by_policy, "teacher_logprobs"),
        *_if(kl == "reward" or by_policy or weighs, student_source(algorithm)),
        *_if(weighs, "rollout_logprobs"),
    )
    advantage_parts = (
        *_if(estimates, algorithm.advantage),
        *_if(kl == "reward", "KL in the reward"),
        *_if(by_policy, f"the teachers' {distill and distill.divergence} as {distill and distill.apply_as}"),
        *_if(weighs, "importance weights for the mismatch"),
    )
    denominator = ratio_source(recipe)
    # Engine and learner are compared at the sampling temperature, unless the engine samples from a truncated
    # distribution.
    at_sampling = recipe.rollout.temperature != 1 and not recipe.cuts_sampling
    update_reads = (
        *_if(policy, "advantages"),
        "rollout_logprobs" if at_sampling else "plain_logprobs",
        *_if(denominator != "own", denominator),
        *_if(by_policy, "teacher_logprobs"),
        *_if(recipe.distils_by_loss, *taught),
        *_if(kl == "loss", "ref_logprobs"),
    )
    loss_parts = (
        *_if(policy, f"policy loss {algorithm.loss}"),
        *_if(recipe.distils_by_loss, f"{distill and distill.divergence} from the teachers ({signal})"),
    )
    of_recipe: dict[str, dict[str, Any]] = {
        "demonstrate": {
            "writes": (*_ROWS, *vision),
            "skip_reason": ""
            if recipe.demonstrates
            else f"{loss}: responses are sampled by {'teachers' if answered else 'the student'}",
        },
        "rollout": {
            "writes": (*_ROWS, "rollout_logprobs", "plain_logprobs", *vision, *experts, *tops),
            "skip_reason": f"{loss}: SFT examples are the batch" if recipe.demonstrates else "",
            "about": "the teachers respond" if answered else "the student responds",
        },
        "reward": {
            "effect": recipe.reward.log_only or answered,
            "about": "select correct responses" if answered else "score each session",
        },
        # Colocated teachers share the learner's devices.
        "teachers": {
            "reads": (*_TOKENS, *images, *tops),
            "writes": taught,
            "side": "sampling" if streamed else "learning",
        },
        "pad": {
            "skip_reason": "one optimizer step on one rank takes a batch of any size"
            if recipe.data_parallel * recipe.train.minibatches == 1 and recipe.train.minibatch_size is None
            else ""
        },
        "old_logprobs": {"reads": (*tokens, *experts)},
        "ref_logprobs": {"reads": tokens},
        "values": {"reads": tokens},
        "advantages": {
            "reads": advantage_reads,
            "writes": ("advantages", *_if(critic, "returns")),
            "about": f"the advantage of each token ({', '.join(advantage_parts) or 'nothing'})",
        },
        "update_critic": {
            "reads": (*_ROWS, *_if(critic, "values", "returns"), *vision),
            "skip_reason": "" if critic else f"algorithm.advantage {algorithm.advantage} has no critic",
        },
        "update_student": {
            "reads": (*_ROWS, *_if(not supervised, *dict.fromkeys(update_reads)), *vision, *experts),
            "first_step": warmup + 1,
            "about": "supervised" if supervised else " + ".join(loss_parts),
        },
        "sync": {"about": f"the engine loads the new weights{' in a later step' if lag else ''}"},
    }
    stages = [replace(spec, **of_recipe.get(spec.name, {})) for spec in TABLE]
    for use in recipe.stages:
        own = find_part("stage", use, of=OwnStage)
        _insert(stages, own.spec(use), own.after)
    readers = {"token_weight": "update_student"}
    if distill is not None:
        readers["teacher_weight"] = "advantages" if by_policy else "update_student"
    for name, reader in readers.items():
        if any(name in stage.writes for stage in stages):
            place = next(i for i, stage in enumerate(stages) if stage.name == reader)
            stages[place] = replace(stages[place], reads=(*stages[place].reads, name))
    return stages


def _if(condition: object, *names: str) -> tuple[str, ...]:
    return names if condition else ()


def _insert(stages: list[StageSpec], spec: StageSpec, after: str) -> None:
    """Insert a custom stage."""
    names = [stage.name for stage in stages]
    allowed = names[names.index("pad") : names.index("sync")]
    if after not in allowed:
        found = f"{spec.use!r}, which comes after {after!r}"
        raise RecipeError("stages", found, f"a stage after one of {', '.join(allowed)}")
    if spec.name in names:
        advice = "rename its function"
        raise RecipeError("stages", f"{spec.use!r}, a second stage {spec.name}", "a unique name", advice)
    stages.insert(names.index(after) + 1, spec)


def _why_unread(recipe: Recipe) -> dict[str, str]:
    """Return, by field, why this recipe does not read it."""
    algorithm = recipe.algorithm
    if not recipe.has_policy_loss:
        old = "the update has no policy loss"
    elif not loss_traits(algorithm.loss).ratio:
        old = f"algorithm.loss {algorithm.loss} has no ratio"
    elif algorithm.old_logprobs == "rollout":
        old = "algorithm.old_logprobs is rollout: the engine's are used"
    elif ratio_source(recipe) == "rollout_logprobs":
        lag = recipe.rollout.lag
        why = f"rollout.lag is {lag}" if lag else f"algorithm.loss is {algorithm.loss}"
        old = f"{why}: the ratio is to the engine's"
    else:
        old = "with one optimizer step per batch, the update's logprobs are the old ones"
    return {
        "old_logprobs": old,
        "ref_logprobs": f"algorithm.kl.place is {algorithm.kl.place}",
        "values": f"algorithm.advantage is {algorithm.advantage}",
        "advantages": f"algorithm.loss is {algorithm.loss}"
        if recipe.is_supervised
        else "the update has no policy loss: reward.weight is 0 and distill.apply_as is loss",
        "reward": "reward.weight is 0" if recipe.reward.weight == 0 else "SFT examples are not scored",
        "teacher_logprobs": "no teacher scores responses" if recipe.distill is None else "",
    }
