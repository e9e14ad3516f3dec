"""The critic role: values before the advantages, and their update after."""

from __future__ import annotations

from collections.abc import Sequence

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan
from practicum.dataplane.ragged import Column
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.learning.minibatches import critic_cut
from practicum.learning.update_batch import CriticBatch
from practicum.learning.value_learner import ValueLearner
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.optimizer_steps import OptimizerStep, optimizer_steps, rank_rows, rank_share
from practicum.roles.stage_extras import extras_of
from practicum.roles.student import mean_metrics

READS = ("prompt_ids", "response_ids", "response_mask", "values", "returns")
"""The columns of the critic's update."""


class CriticRole:
    """The critic's stages; on several ranks as those of `Student`."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store, critic: ValueLearner) -> None:
        self.recipe, self.plan, self.store, self.critic = recipe, plan, store, critic
        self.parallel = critic.parallel

    def values(self, batch: BatchRef) -> None:
        """What the critic expects before each response token."""
        self._values(rank_share(batch, self.parallel))

    def update(self, batch: BatchRef, *, step: int) -> dict[str, float] | None:
        """All optimizer steps of the critic on this batch."""
        steps = optimizer_steps(self.recipe, critic_cut(self.recipe), batch, step, self.parallel)
        part, mine = rank_rows(batch, steps)
        return self._update(part, batch, list(zip(steps, mine, strict=True)), step)

    @stage("values")
    def _values(self, batch: BatchRef, columns: Columns) -> dict[str, Column]:
        ids = columns.ragged("prompt_ids"), columns.ragged("response_ids")
        return {"values": self.critic.values(*ids, extras=extras_of(columns, batch))}

    @stage("update_critic")
    def _update(
        self,
        part: BatchRef,
        columns: Columns,
        batch: BatchRef,
        steps: Sequence[tuple[OptimizerStep, list[int]]],
        step: int,
    ) -> tuple[dict[str, Column], dict[str, float]]:
        """`steps` have the rows of each optimizer step in `batch`, and this rank's in `part`."""
        self.critic.step = step - 1
        extras = extras_of(columns, part)
        taken = []
        for turn, mine in steps:
            tokens = sum(batch.tags[row].sampled_tokens for row in turn.rows)
            update = CriticBatch(
                **{name: columns.ragged(name).select(mine) for name in READS},
                extras=None if extras is None else extras.select(mine),
                whole_tokens=None if self.parallel is None else tokens,
            )
            taken.append(self.critic.update(update))
        return {}, mean_metrics(taken)
