"""The mini-batches of a batch as the learner's roles run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.dataplane.batch import BatchRef
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
from practicum.recipe.algorithm_traits import LOSSES
from practicum.recipe.derived import has_policy_loss
from practicum.recipe.schema.recipe import Recipe


def whole_sessions(recipe: Recipe) -> bool:
    """Whether no session may be cut."""
    return LOSSES[recipe.algorithm.loss].whole_sessions and has_policy_loss(recipe)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step, as places in the batch."""

    rows: list[int]
    """Real rows of the mini-batch."""
    mine: list[int]
    """Those of this rank."""


def optimizer_steps(
    recipe: Recipe, cut: Cut, batch: BatchRef, step: int, parallel: Parallel | None, *, whole: bool = False
) -> list[OptimizerStep]:
    """The optimizer steps on a batch, over all epochs; with `whole` no session is cut.

    A function of keys and tags: every rank finds the same ones. Rows that ranks can't share evenly are a
    ValueError.
    """
    rank, ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
    found = []
    for epoch in range(recipe.train.epochs):
        cuts = _cuts(recipe, cut, batch, step, epoch, ranks, whole)
        for one, parts in zip(cuts, _assigned(batch, cuts, ranks, whole), strict=True):
            real = set(one.real)
            found.append(OptimizerStep(one.real, [row for row in parts[rank] if row in real]))
    return found


def rank_rows(batch: BatchRef, optimizer_steps: Sequence[OptimizerStep]) -> tuple[BatchRef, list[list[int]]]:
    """The rows that this rank needs for these steps, and where its rows of each step are among them.

    A rank that has none takes a padding row, so that it can take part.
    """
    rows = sorted({row for turn in optimizer_steps for row in turn.mine})
    place = {row: i for i, row in enumerate(rows)}
    if not rows and optimizer_steps:
        rows = [i for i, tags in enumerate(batch.tags) if tags.is_padding][:1]
    return batch.take(rows), [[place[row] for row in turn.mine] for turn in optimizer_steps]


def rank_share(batch: BatchRef, parallel: Parallel | None) -> BatchRef:
    """This rank's rows of a batch in a stage without mini-batches: equally many on each, tokens even."""
    if parallel is None:
        return batch
    return batch.take(partition(_tokens(batch), parallel.world)[parallel.rank])


def padding_rows_needed(recipe: Recipe, batch: BatchRef, step: int, ranks: int) -> int:
    """Padding rows with which all updates of a step cut evenly over mini-batches and ranks."""
    cuts, spare = running_cuts(recipe, step), 0
    if ranks > 1 and whole_sessions(recipe):
        largest = max(Counter(key[:2] for key in batch.keys).values())
        spare = max(spare_padding(largest, cut.steps(len(batch)), ranks) for cut in cuts)
    return spare + padding_needed(len(batch) + spare, needed_multiple(ranks, cuts))


def balance_metrics(recipe: Recipe, batch: BatchRef, step: int, ranks: int) -> dict[str, float]:
    """How evenly the tokens of a filled batch lie on the ranks, by rows in order and by `assign_ranks`.

    Nothing for a single rank, and for a batch without a real row.
    """
    if ranks == 1:
        return {}
    cut, whole = running_cuts(recipe, step)[-1], whole_sessions(recipe)
    tokens, cuts = _tokens(batch), _cuts(recipe, cut, batch, step, 0, ranks, whole)
    before = [[[one.rows[i] for i in part] for part in in_order(len(one), ranks)] for one in cuts]
    found = {
        "balance/before": step_imbalance(tokens, before),
        "balance/after": step_imbalance(tokens, _assigned(batch, cuts, ranks, whole)),
    }
    return {name: value for name, value in found.items() if value is not None}


def session_tokens(batch: BatchRef) -> list[int]:
    """Sampled tokens of each row's whole session."""
    tokens: dict[tuple[int, ...], int] = {}
    for key, tags in batch:
        tokens[key[:2]] = tokens.get(key[:2], 0) + tags.sampled_tokens
    return [tokens[key[:2]] for key in batch.keys]


def _cuts(
    recipe: Recipe, cut: Cut, batch: BatchRef, step: int, epoch: int, ranks: int, whole: bool
) -> list[Minibatch]:
    prompts = [key.prompt for key in batch.keys]
    sessions = [key.session for key in batch.keys]
    padding = [tags.is_padding for tags in batch.tags]
    options = {"seed": recipe.seed, "step": step, "epoch": epoch, "whole_sessions": whole, "ranks": ranks}
    return spread(prompts, sessions, padding, cut, **options)


def _assigned(batch: BatchRef, cuts: Sequence[Minibatch], ranks: int, whole: bool) -> list[Parts]:
    sessions = [key[:2] for key in batch.keys] if whole else None
    return assign_ranks(cuts, _tokens(batch), ranks, sessions)


def _tokens(batch: BatchRef) -> list[int]:
    return [tags.prompt_tokens + tags.response_tokens for tags in batch.tags]
