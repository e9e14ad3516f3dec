"""The padding role: rows that do nothing fill a batch up, so that mini-batches and ranks share it evenly.

Here are the stage that writes them, and which rows of a padded batch each optimizer step and rank takes.
What a padding row holds is `dataplane/padding_rows.py`'s; how mini-batches are cut is
`learning/minibatches.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import check_padding_rules
from practicum.dataplane.padding_rows import padding_batch
from practicum.dataplane.ragged import Column, Columns
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.errors import RecipeError
from practicum.learning.balance import Parts, assign_ranks, in_order, partition, step_imbalance
from practicum.learning.minibatches import (
    Cut,
    Minibatch,
    needed_multiple,
    padding_needed,
    running_cuts,
    spare_padding,
    spread,
)
from practicum.learning.parallel import Parallel
from practicum.models.experts import routes_of
from practicum.models.vision import AXES
from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.derived import has_policy_loss
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.run_stage import StepInfo, stage


class PaddingRole:
    """Fills batches up with rows that do nothing, for `ranks` data-parallel ranks."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        widths: Mapping[str, int],
        ranks: int,
    ) -> None:
        self.recipe, self.plan, self.store = recipe, plan, store
        self.widths, self.ranks = widths, ranks
        assert isinstance(tokenizer.eos_token_id, int)
        self._end_id = tokenizer.eos_token_id

    @stage("pad")
    def pad(self, batch: BatchRef, columns: Columns, step: StepInfo) -> tuple[dict[str, Column], BatchRef]:
        """Write the padding rows that the step needs, with every field that a stage writes; reports them."""
        count = padding_rows_needed(self.recipe, batch, step.number, self.ranks)
        if not count:
            return {}, batch.take([])
        options = {"end_id": self._end_id, "widths": self.widths}
        padding, written = padding_batch(batch.partition, count, padding_fields(self.plan), **options)
        self.store.put(padding, written)
        return {}, padding


def padding_rows_needed(recipe: Recipe, batch: BatchRef, step: int, ranks: int) -> int:
    """Padding rows with which all updates of a step are cut evenly over mini-batches and ranks."""
    cuts, spare = running_cuts(recipe, step), 0
    if ranks > 1 and whole_sessions(recipe):
        largest = max(Counter(key[:2] for key in batch.keys).values())
        spare = max(spare_padding(largest, cut.steps(len(batch)), ranks) for cut in cuts)
    return spare + padding_needed(len(batch) + spare, needed_multiple(ranks, cuts))


def padding_fields(plan: Plan) -> list[str]:
    """The fields of a padding row: all that a stage of the plan writes."""
    return list(dict.fromkeys(name for stage in plan for name in stage.writes))


def field_widths(recipe: Recipe, model: PreTrainedModel, teacher_width: int) -> dict[str, int]:
    """The trailing axes of fields, by their letters in the fields table."""
    widths = {"D": AXES}
    if recipe.distill is not None:
        widths |= {"K": recipe.distill.top_k, "H": teacher_width}
    if (routes := routes_of(model)) is not None:
        widths |= {"L": routes.layers, "E": routes.per_token}
    return widths


def check_fields(plan: Plan, model: PreTrainedModel) -> None:
    """Every field of the plan can be padded and made: experts to be replayed can be recorded."""
    if "pad" in plan:
        check_padding_rules(padding_fields(plan))
    if not any("routed_experts" in stage.writes for stage in plan):
        return
    routes = routes_of(model)
    if routes is None or not routes.can_replay:
        found = f"true with {type(model).__name__}, whose routers can't be recorded and replayed"
        raise RecipeError("train.replay_experts", found, "false")


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
