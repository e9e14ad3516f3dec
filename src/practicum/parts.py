"""Decorators that declare custom parts, and the types that they take and return.

A recipe names a part as package.module:name. `docs/extend.md` has an example of each kind. Nothing in
practicum imports this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from practicum.algorithms.advantages import (
    AdvantageInputs,
    AdvantageResult,
    discounted_returns,
    group_scores,
    session_scores,
    to_tokens,
    whiten,
)
from practicum.algorithms.aggregation import session_count
from practicum.algorithms.divergences import Buckets, BucketTerms
from practicum.algorithms.losses import PolicyInputs, PolicyTerms, policy_terms, token_log_ratios
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import Field
from practicum.dataplane.ragged import Columns, Ragged
from practicum.dataplane.stages import OwnStage
from practicum.engines.protocol import Counter, GenerateRequest, Sampling
from practicum.recipe.algorithm_traits import ESTIMATOR_OPTIONS, LOSS_OPTIONS, EstimatorTraits, LossTraits
from practicum.recipe.schema.recipe import Recipe, Train
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.roles.run_stage import StepInfo
from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Option, Procedural, Settings

__all__ = [
    "AdvantageInputs",
    "AdvantageResult",
    "BatchRef",
    "BucketTerms",
    "Buckets",
    "Columns",
    "Counter",
    "Draws",
    "Example",
    "Field",
    "GenerateRequest",
    "Option",
    "PolicyInputs",
    "PolicyTerms",
    "Procedural",
    "Ragged",
    "Recipe",
    "RewardFunctions",
    "RewardSample",
    "Sampling",
    "Settings",
    "StepInfo",
    "Train",
    "advantage",
    "discounted_returns",
    "group_scores",
    "policy_loss",
    "policy_terms",
    "session_count",
    "session_scores",
    "stage",
    "to_tokens",
    "token_log_ratios",
    "whiten",
]

F = TypeVar("F", bound=Callable[..., Any])
_STAGE_TAKES = ("rank", "batch", "columns", "step")


def advantage(
    *,
    compares_groups: bool = False,
    greedy_baseline: bool = False,
    critic: bool = False,
    reads: Iterable[str] | None = None,
) -> Callable[[F], F]:
    """Declare the `EstimatorTraits` of an advantage estimator. Without the decorator, it has no requirements.

    `reads` lists the options among gamma and lam that it reads. The default None means all.
    """
    options = _options(reads, ESTIMATOR_OPTIONS)
    return _with_traits(EstimatorTraits(compares_groups, greedy_baseline, critic, options))


def policy_loss(
    *, ratio: bool = True, whole_sessions: bool = False, reads: Iterable[str] | None = None
) -> Callable[[F], F]:
    """Declare the `LossTraits` of a policy loss. Without the decorator, it has a ratio.

    `reads` lists the options that it reads, such as clip_low. The default None means all.
    """
    # The bonus is added to every policy loss.
    options = _options(reads, LOSS_OPTIONS) | {"entropy"}
    return _with_traits(LossTraits(ratio, whole_sessions=whole_sessions, reads=options))


def stage(
    *,
    after: str,
    reads: Sequence[str] = (),
    writes: Sequence[str | Field] = (),
    ranks: Literal["all", "first"] = "all",
    about: str = "",
) -> Callable[[Callable[..., Any]], OwnStage]:
    """Declare `function(rank, batch, columns, step)` as a stage that runs after the stage `after`.

    It runs on the learner (`rank.recipe`, `rank.tokenizer`, `rank.student`): on all ranks, each with its
    rows, or on the first rank with all rows. It returns its writes, or (writes, metrics). A `Field` in
    `writes` declares a custom field.
    """

    def declare(function: Callable[..., Any]) -> OwnStage:
        try:
            inspect.signature(function).bind(*_STAGE_TAKES)
        except TypeError as error:
            takes, expected = inspect.signature(function), ", ".join(_STAGE_TAKES)
            text = f"stage {function.__name__} takes {takes}, expected ({expected}): {error}"
            raise TypeError(text) from None
        return OwnStage(function, function.__name__, after, tuple(reads), tuple(writes), ranks, about)

    return declare


def _options(reads: Iterable[str] | None, known: frozenset[str]) -> frozenset[str]:
    options = known if reads is None else frozenset(reads)
    if unknown := sorted(options - known):
        raise ValueError(f"reads has {', '.join(unknown)}, expected some of {', '.join(sorted(known))}")
    return options


def _with_traits(traits: EstimatorTraits | LossTraits) -> Callable[[F], F]:
    def declare(function: F) -> F:
        function.__dict__["traits"] = traits
        return function

    return declare
