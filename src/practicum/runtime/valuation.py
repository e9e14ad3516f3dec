"""The critic role: values before the advantages, and their update after."""

from __future__ import annotations

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan
from practicum.dataplane.ragged import Column
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.learning.batch import CriticBatch
from practicum.learning.critic import Critic
from practicum.learning.minibatches import critic_cut
from practicum.recipe.schema import Recipe
from practicum.runtime.cutting import minibatches
from practicum.runtime.extras import extras_of
from practicum.runtime.student import mean_metrics

READS = ("prompt_ids", "response_ids", "response_mask", "values", "returns")
"""The columns of the critic's update."""


class Valuation:
    """The critic's stages."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store, critic: Critic) -> None:
        self.recipe, self.plan, self.store, self.critic = recipe, plan, store, critic

    @stage("values")
    def values(self, batch: BatchRef, columns: Columns) -> dict[str, Column]:
        """What the critic expects before each response token."""
        ids = columns.ragged("prompt_ids"), columns.ragged("response_ids")
        return {"values": self.critic.values(*ids, extras=extras_of(columns, batch))}

    @stage("update_critic")
    def update(
        self, batch: BatchRef, columns: Columns, *, step: int
    ) -> tuple[dict[str, Column], dict[str, float]]:
        """All optimizer steps of the critic on this batch."""
        self.critic.step = step - 1
        extras = extras_of(columns, batch)
        taken = [
            self.critic.update(
                CriticBatch(
                    **{name: columns.ragged(name).select(rows) for name in READS},
                    extras=None if extras is None else extras.select(rows),
                )
            )
            for rows in minibatches(self.recipe, critic_cut(self.recipe), batch, step)
        ]
        return {}, mean_metrics(taken)
