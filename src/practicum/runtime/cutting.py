"""The mini-batches of a batch as the learner's roles run them."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.dataplane.batch import BatchRef
from practicum.learning.minibatches import Cut, spread
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


def session_tokens(batch: BatchRef) -> list[int]:
    """Sampled tokens of each row's whole session."""
    tokens: dict[tuple[int, ...], int] = {}
    for key, tags in batch:
        tokens[key[:2]] = tokens.get(key[:2], 0) + tags.sampled_tokens
    return [tokens[key[:2]] for key in batch.keys]
