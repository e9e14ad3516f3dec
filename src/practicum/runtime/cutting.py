"""The mini-batches of a batch as the learner's roles run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from practicum.dataplane.batch import BatchRef
from practicum.learning.balance import assign_ranks, in_order, step_imbalance
from practicum.learning.minibatches import (
    Cut,
    needed_multiple,
    padding_needed,
    running_cuts,
    spare_padding,
    spread,
)
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import has_policy_loss


def whole_sessions(recipe: Recipe) -> bool:
    """Whether a session must not be cut: gspo's ratio is of all its tokens."""
    return recipe.algorithm.loss == "gspo" and has_policy_loss(recipe)


def minibatches(
    recipe: Recipe, cut: Cut, batch: BatchRef, step: int, *, whole: bool = False
) -> Iterator[list[int]]:
    """Rows of each optimizer step on a batch without padding, over all epochs."""
    prompts = [key.prompt for key in batch.keys]
    sessions = [key.session for key in batch.keys]
    padding = [tags.is_padding for tags in batch.tags]
    for epoch in range(recipe.train.epochs):
        cuts = spread(
            prompts, sessions, padding, cut, seed=recipe.seed, step=step, epoch=epoch, whole_sessions=whole
        )
        yield from (one.real for one in cuts)


def rows_lacking(recipe: Recipe, batch: BatchRef, step: int, ranks: int) -> int:
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
    tokens = [tags.prompt_tokens + tags.response_tokens for tags in batch.tags]
    cut, whole = running_cuts(recipe, step)[-1], whole_sessions(recipe)
    columns = ([key.prompt for key in batch.keys], [key.session for key in batch.keys])
    padding = [tags.is_padding for tags in batch.tags]
    options = {"seed": recipe.seed, "step": step, "epoch": 0, "whole_sessions": whole, "ranks": ranks}
    cuts = spread(*columns, padding, cut, **options)
    before = [[[one.rows[i] for i in part] for part in in_order(len(one), ranks)] for one in cuts]
    found = {
        "balance/before": step_imbalance(tokens, before),
        "balance/after": step_imbalance(tokens, assign_ranks(cuts, tokens, ranks)),
    }
    return {name: value for name, value in found.items() if value is not None}


def session_tokens(batch: BatchRef) -> list[int]:
    """Sampled tokens of each row's whole session."""
    tokens: dict[tuple[int, ...], int] = {}
    for key, tags in batch:
        tokens[key[:2]] = tokens.get(key[:2], 0) + tags.sampled_tokens
    return [tokens[key[:2]] for key in batch.keys]
