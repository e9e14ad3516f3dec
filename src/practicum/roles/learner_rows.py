"""The rows of a batch as the ranks of the learner take them: mini-batches, shares, and what rows carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Columns
from practicum.learning.balance import Parts, assign_ranks, in_order, partition, step_imbalance
from practicum.learning.minibatches import Cut, Minibatch, running_cuts, spread
from practicum.learning.packing import RowExtras
from practicum.learning.parallel import Parallel
from practicum.models.images import Images
from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.derived import has_policy_loss
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.run_stage import StepInfo


def whole_sessions(recipe: Recipe) -> bool:
    """Whether no session may be cut."""
    return loss_traits(recipe.algorithm.loss).whole_sessions and has_policy_loss(recipe)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step, as places in the whole batch."""

    rows: list[int]
    """Real rows of the mini-batch."""
    own_rows: list[int]
    """Those of this rank."""


def optimizer_steps(
    recipe: Recipe, cut: Cut, step: StepInfo, parallel: Parallel | None, *, whole: bool = False
) -> list[OptimizerStep]:
    """The optimizer steps on the step's batch, over all epochs; with `whole` no session is cut.

    A function of keys and tags: every rank computes the same ones. Rows that ranks can't share evenly are a
    ValueError.
    """
    rank, ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
    steps = []
    for epoch in range(recipe.train.epochs):
        minibatches = _minibatches(recipe, cut, step.batch, step.number, epoch, ranks, whole)
        assigned = _assigned(step.batch, minibatches, ranks, whole)
        for minibatch, parts in zip(minibatches, assigned, strict=True):
            real = set(minibatch.real)
            steps.append(OptimizerStep(minibatch.real, [row for row in parts[rank] if row in real]))
    return steps


def rank_rows(batch: BatchRef, steps: Sequence[OptimizerStep]) -> BatchRef:
    """The rows that this rank needs for these steps; a rank that needs none takes a padding row."""
    rows = sorted({row for step in steps for row in step.own_rows})
    if not rows and steps:
        rows = [i for i, tags in enumerate(batch.tags) if tags.is_padding][:1]
    return batch.take(rows)


class _OnRank(Protocol):
    """A role of one rank."""

    @property
    def parallel(self) -> Parallel | None: ...


def rank_share(role: _OnRank, step: StepInfo) -> BatchRef:
    """This rank's rows in a stage without mini-batches: equally many on each, tokens even."""
    if role.parallel is None:
        return step.batch
    return step.batch.take(partition(_tokens(step.batch), role.parallel.world)[role.parallel.rank])


def balance_metrics(recipe: Recipe, batch: BatchRef, step: int, ranks: int) -> dict[str, float]:
    """How evenly the tokens of a padded batch lie on the ranks, by rows in order and by `assign_ranks`.

    Nothing for a single rank, and for a batch without a real row.
    """
    if ranks == 1:
        return {}
    cut, whole = running_cuts(recipe, step)[-1], whole_sessions(recipe)
    tokens, minibatches = _tokens(batch), _minibatches(recipe, cut, batch, step, 0, ranks, whole)
    before = [[[m.rows[i] for i in part] for part in in_order(len(m), ranks)] for m in minibatches]
    metrics = {
        "balance/before": step_imbalance(tokens, before),
        "balance/after": step_imbalance(tokens, _assigned(batch, minibatches, ranks, whole)),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def session_tokens(batch: BatchRef) -> list[int]:
    """Sampled tokens of each row's whole session."""
    tokens: dict[tuple[int, ...], int] = {}
    for key, tags in batch:
        tokens[key[:2]] = tokens.get(key[:2], 0) + tags.sampled_tokens
    return [tokens[key[:2]] for key in batch.keys]


def _minibatches(
    recipe: Recipe, cut: Cut, batch: BatchRef, step: int, epoch: int, ranks: int, whole: bool
) -> list[Minibatch]:
    prompts = [key.prompt for key in batch.keys]
    sessions = [key.session for key in batch.keys]
    padding = [tags.is_padding for tags in batch.tags]
    options = {"seed": recipe.seed, "step": step, "epoch": epoch, "whole_sessions": whole, "ranks": ranks}
    return spread(prompts, sessions, padding, cut, **options)


def _assigned(batch: BatchRef, minibatches: Sequence[Minibatch], ranks: int, whole: bool) -> list[Parts]:
    sessions = [key[:2] for key in batch.keys] if whole else None
    return assign_ranks(minibatches, _tokens(batch), ranks, sessions)


def _tokens(batch: BatchRef) -> list[int]:
    return [tags.prompt_tokens + tags.response_tokens for tags in batch.tags]


def images_of(columns: Columns, batch: BatchRef) -> list[Images | None]:
    """The pictures of each row, if the model has eyes."""
    if "multi_modal_inputs" not in columns:
        return [None] * len(batch)
    return [Images.from_inputs(inputs) for inputs in columns.objects("multi_modal_inputs")]


def extras_of(columns: Columns, batch: BatchRef) -> RowExtras | None:
    """What the stage read of them; None if tokens are all there is."""
    names = ("position_ids", "multi_modal_inputs", "routed_experts")
    if not any(name in columns for name in names):
        return None
    return RowExtras(
        position_ids=columns.ragged("position_ids") if "position_ids" in columns else None,
        images=images_of(columns, batch) if "multi_modal_inputs" in columns else None,
        routed_experts=columns.ragged("routed_experts") if "routed_experts" in columns else None,
    )
