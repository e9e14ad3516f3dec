"""Which stages a recipe runs, what each reads and writes, and why the others are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES
from practicum.recipe.counts import Counts, count
from practicum.recipe.derived import (
    Traits,
    corrects_mismatch,
    data_parallel,
    distils_by_loss,
    distils_by_policy,
    has_advantage_estimator,
    has_policy_loss,
    model_traits,
    uses_reward,
)
from practicum.recipe.schema.recipe import Recipe

OldSource = Literal["own", "old_logprobs", "rollout_logprobs"]

_TOKENS = ("prompt_ids", "response_ids")
_ROWS = (*_TOKENS, "response_mask")
SIGHT = ("position_ids", "multi_modal_inputs")
"""What rows of vision models have besides."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage of a step: the fields it reads and writes. One with an effect always runs."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    effect: bool = False
    about: str = ""
    not_asked: str = ""
    """Why this recipe rules the stage out, whatever its effect or readers; empty if it does not."""


@dataclass(frozen=True)
class Plan:
    """The stages that run, in order, and the skipped ones, each with a reason in words."""

    stages: tuple[StageSpec, ...]
    skipped: tuple[tuple[StageSpec, str], ...] = ()
    counts: Counts | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> StageSpec:
        for stage in self.stages:
            if stage.name == name:
                return stage
        why = next((why for stage, why in self.skipped if stage.name == name), "no such stage")
        raise KeyError(f"stage {name!r} is not in the plan: {why}")

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self.stages)

    def __iter__(self) -> Iterator[StageSpec]:
        return iter(self.stages)

    def writer(self, reader: str, name: str) -> str:
        """The stage whose value of field `name` the stage `reader` sees: the last one before it."""
        before = self.stages[: self.stages.index(self[reader])]
        return next(stage.name for stage in reversed(before) if name in stage.writes)


def make_plan(recipe: Recipe, traits: Traits | None = None) -> Plan:
    """The plan of a recipe; a stage that would read what nobody writes is a RecipeError.

    `traits` are the student's, if more is known than `model_traits` can find out.
    """
    traits = model_traits(recipe.model) if traits is None else traits
    return replace(resolve(candidates(recipe, traits), _why_unread(recipe)), counts=count(recipe))


def old_source(recipe: Recipe) -> OldSource:
    """Where the logprobs before the update come from: for the ratio, and for what the advantages need.

    own: the update's own logprobs, detached, are the old ones; nothing is stored for them. A loss
    without a ratio reads none of them, even if the advantages do.
    """
    algorithm, train = recipe.algorithm, recipe.train
    in_advantages = _advantages_need_old(recipe)
    if not in_advantages and not _has_ratio(recipe):
        return "own"
    if algorithm.old_logprobs == "rollout":
        return "rollout_logprobs"
    several = train.epochs * train.minibatches > 1 or train.minibatch_rows is not None
    if algorithm.old_logprobs == "recompute" or several or in_advantages:
        return "old_logprobs"
    return "own"


def resolve(candidates: Sequence[StageSpec], why_unread: Mapping[str, str] | None = None) -> Plan:
    """Keep the stages with an effect and those whose writes a later kept stage reads, in order.

    A kept stage that reads what no earlier one writes is a RecipeError. `why_unread` explains for a
    field why this recipe does not read it.
    """
    assert len({stage.name for stage in candidates}) == len(candidates), "stages share a name"
    kept: list[StageSpec] = []
    wanted: set[str] = set()
    for stage in reversed(candidates):
        if not stage.not_asked and (stage.effect or wanted & set(stage.writes)):
            kept.append(stage)
            wanted = (wanted - set(stage.writes)) | set(stage.reads)
    kept.reverse()
    _check_reads(kept, candidates)
    names = {stage.name for stage in kept}
    skipped = tuple(
        (stage, _reason(stage, candidates, why_unread or {}))
        for stage in candidates
        if stage.name not in names
    )
    return Plan(tuple(kept), skipped)


def candidates(recipe: Recipe, traits: Traits) -> list[StageSpec]:
    """Every stage there is, in order, with this recipe's reads and writes."""
    algorithm = recipe.algorithm
    critic = ESTIMATORS[algorithm.advantage].critic
    no_critic = "" if critic else f"algorithm.advantage {algorithm.advantage} has no critic"
    gains = ("advantages", "returns") if critic else ("advantages",)
    learns = (*_ROWS, "values", "returns") if critic else _ROWS
    watched = recipe.reward.watch
    seen = SIGHT if traits.vision else ()
    shown = ("multi_modal_inputs",) if traits.vision else ()
    taken = ("routed_experts",) if replays(recipe, traits) else ()
    scored = (*_TOKENS, *seen)
    return [
        *_practice(recipe, seen, taken),
        StageSpec("reward", _ROWS, ("reward", "reward_tokens"), effect=watched, about="judge each session"),
        StageSpec(
            "teachers", (*_TOKENS, *shown), _teacher_writes(recipe), about="the teachers score each answer"
        ),
        StageSpec(
            "pad", effect=True, about="fill the batch up with rows that do nothing", not_asked=_whole(recipe)
        ),
        StageSpec(
            "old_logprobs", (*scored, *taken), ("old_logprobs",), about="the student before the update"
        ),
        StageSpec("ref_logprobs", scored, ("ref_logprobs",), about="the reference policy"),
        StageSpec("values", scored, ("values",), about="what the critic expects"),
        StageSpec("advantages", _judged(recipe), gains, about=f"what each token was worth ({_by(recipe)})"),
        StageSpec("update_critic", (*learns, *seen), effect=True, about="value loss", not_asked=no_critic),
        StageSpec(
            "update_student", (*_update_reads(recipe), *seen, *taken), effect=True, about=_loss(recipe)
        ),
        StageSpec("sync", effect=True, about="the engine takes the new weights"),
        StageSpec("clear", effect=True, about="the store forgets the step"),
    ]


def evaluation_plan() -> Plan:
    """The stages of an evaluation: answers and their rewards, nothing else."""
    return Plan(
        (
            StageSpec("rollout", writes=_ROWS, about="the student answers"),
            StageSpec("reward", _ROWS, ("reward", "reward_tokens"), effect=True, about="judge each session"),
        )
    )


def draw(plan: Plan) -> str:
    """The plan for people: stages, what they read (from whom) and write, and what is skipped."""
    lines = []
    for number, stage in enumerate(plan.stages, start=1):
        lines.append(f"{number:>2}. {stage.name:<15} {stage.about}".rstrip())
        by_writer: dict[str, list[str]] = {}
        for name in stage.reads:
            by_writer.setdefault(plan.writer(stage.name, name), []).append(name)
        for writer, names in by_writer.items():
            lines.append(f"      ← {', '.join(names)}   (from {writer})")
        if stage.writes:
            lines.append(f"      → {', '.join(stage.writes)}")
    if plan.skipped:
        lines += ["", "not run:"]
        lines += [f"  – {stage.name:<15} {why}" for stage, why in plan.skipped]
    if plan.counts is not None:
        lines += ["", "counts:", *(f"  {line}" for line in plan.counts.lines())]
    return "\n".join(lines)


def chain(plan: Plan) -> str:
    """The stages that run, on one line."""
    return " → ".join(stage.name for stage in plan.stages)


def replays(recipe: Recipe, traits: Traits) -> bool:
    """Whether the learner takes the experts that the engine took; demonstrations have none."""
    return traits.moe and recipe.train.replay_experts and recipe.algorithm.loss != "supervised"


def _whole(recipe: Recipe) -> str:
    """Why no batch of this recipe needs padding; empty if one may."""
    train, critic = recipe.train, recipe.critic
    if data_parallel(recipe) > 1:
        return ""
    rows = (train.minibatch_rows, critic.minibatch_rows if critic is not None else None)
    if train.minibatches > 1 or any(number is not None for number in rows):
        return ""
    return "one optimizer step on one rank takes the whole batch, of any size"


def _practice(recipe: Recipe, seen: tuple[str, ...], taken: tuple[str, ...]) -> tuple[StageSpec, StageSpec]:
    """The two ways to get a batch; a recipe asks for one of them."""
    supervised = recipe.algorithm.loss == "supervised"
    loss = f"algorithm.loss is {recipe.algorithm.loss}"
    return (
        StageSpec(
            "demonstrate",
            writes=(*_ROWS, *seen),
            about="an expert's turns",
            not_asked="" if supervised else f"{loss}: the student's own answers are the batch",
        ),
        StageSpec(
            "rollout",
            writes=(*_ROWS, "rollout_logprobs", "plain_logprobs", *seen, *taken),
            about="the student answers",
            not_asked=f"{loss}: demonstrations are the batch" if supervised else "",
        ),
    )


def _judged(recipe: Recipe) -> tuple[str, ...]:
    """What the advantages are made from."""
    algorithm = recipe.algorithm
    reads = ["response_mask"]
    if uses_reward(recipe):
        reads.append("reward_tokens")
    if has_advantage_estimator(recipe) and ESTIMATORS[algorithm.advantage].critic:
        reads.append("values")
    if algorithm.kl.place == "reward":
        reads.append("ref_logprobs")
    if distils_by_policy(recipe):
        reads.append("teacher_logprobs")
    if _advantages_need_old(recipe):
        reads.append(old_source(recipe))
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
    if recipe.algorithm.loss == "supervised":
        return _ROWS
    reads = [*_ROWS, *(["advantages"] if has_policy_loss(recipe) else []), "plain_logprobs"]
    if _has_ratio(recipe) and old_source(recipe) != "own":
        reads.append(old_source(recipe))
    if recipe.distill is not None:
        reads += _teacher_writes(recipe) if distils_by_loss(recipe) else ("teacher_logprobs",)
    if recipe.algorithm.kl.place == "loss":
        reads.append("ref_logprobs")
    return tuple(reads)


def _loss(recipe: Recipe) -> str:
    """The student's loss in words."""
    if recipe.algorithm.loss == "supervised":
        return "supervised"
    parts = [f"policy loss {recipe.algorithm.loss}"] if has_policy_loss(recipe) else []
    if recipe.distill is not None and distils_by_loss(recipe):
        parts.append(f"{recipe.distill.divergence} from the teachers ({recipe.distill.signal})")
    return " + ".join(parts)


def _has_ratio(recipe: Recipe) -> bool:
    return has_policy_loss(recipe) and LOSSES[recipe.algorithm.loss].ratio


def _advantages_need_old(recipe: Recipe) -> bool:
    """For a KL in the reward, teachers in it or in the advantage, and weights against the mismatch."""
    in_reward = recipe.algorithm.kl.place == "reward" or distils_by_policy(recipe)
    return in_reward or corrects_mismatch(recipe)


def _by(recipe: Recipe) -> str:
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
    else:
        old = "a batch gets one optimizer step, whose own logprobs are the old ones"
    return {
        "old_logprobs": old,
        "ref_logprobs": f"algorithm.kl.place is {algorithm.kl.place}",
        "values": f"algorithm.advantage is {algorithm.advantage}",
        "advantages": f"algorithm.loss is {algorithm.loss}"
        if algorithm.loss == "supervised"
        else "there is no policy loss: reward.weight is 0 and the teachers enter by the loss",
        "reward": "reward.weight is 0" if recipe.reward.weight == 0 else "demonstrations are not judged",
        "teacher_logprobs": "the recipe has no teachers" if recipe.distill is None else "",
    }


def _check_reads(kept: Sequence[StageSpec], candidates: Sequence[StageSpec]) -> None:
    written: set[str] = set()
    for stage in kept:
        for name in stage.reads:
            if name not in written:
                others = [other.name for other in candidates if name in other.writes]
                raise RecipeError(
                    f"stage {stage.name}",
                    f"that it reads {name}, which no stage before it writes",
                    f"an earlier stage that writes {name}",
                    f"{' and '.join(others)} would, but not before it" if others else "",
                )
        written.update(stage.writes)


def _reason(stage: StageSpec, candidates: Sequence[StageSpec], why: Mapping[str, str]) -> str:
    if stage.not_asked:
        return stage.not_asked
    fields = " and ".join(stage.writes) or "anything of it"
    later = candidates[candidates.index(stage) + 1 :]
    readers = [other.name for other in later if set(stage.writes) & set(other.reads)]
    if readers:
        return f"nobody reads {fields}: {' and '.join(readers)} would, but is not run"
    reasons = [why[name] for name in stage.writes if why.get(name)]
    return f"nobody reads {fields}" + (f": {'; '.join(reasons)}" if reasons else "")
