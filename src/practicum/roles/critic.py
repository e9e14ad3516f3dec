"""The critic role: values before the advantages, and their update after."""

from __future__ import annotations

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Column, Columns
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.learning.minibatches import critic_cut
from practicum.learning.packing import RowExtras
from practicum.learning.update_batch import CriticBatch
from practicum.learning.value_learner import ValueLearner
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.padding import OptimizerStep, optimizer_steps, rank_rows, rank_share
from practicum.roles.run_stage import StepInfo, stage
from practicum.roles.student import mean_metrics

READS = ("prompt_ids", "response_ids", "response_mask", "values", "returns")
"""The columns of the critic's update."""


class CriticRole:
    """The critic's stages; on several ranks as those of `StudentRole`."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store, critic: ValueLearner) -> None:
        self.recipe, self.plan, self.store, self.critic = recipe, plan, store, critic
        self.parallel = critic.parallel

    @stage("values", rows=rank_share)
    def values(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """What the critic expects before each response token."""
        ids = columns.ragged("prompt_ids"), columns.ragged("response_ids")
        return {"values": self.critic.values(*ids, extras=RowExtras.of(columns))}

    def _optimizer_steps(self, step: StepInfo) -> list[OptimizerStep]:
        return optimizer_steps(self.recipe, critic_cut(self.recipe), step, self.parallel)

    def _update_rows(self, step: StepInfo) -> BatchRef:
        return rank_rows(step.batch, self._optimizer_steps(step))

    @stage("update_critic", rows=_update_rows)
    def update(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], dict[str, float]]:
        """All optimizer steps of the critic on this batch."""
        self.critic.step = step.number - 1
        extras, place = RowExtras.of(columns), {key: i for i, key in enumerate(batch.keys)}
        reports = []
        for optimizer_step in self._optimizer_steps(step):
            rows = [place[step.batch.keys[row]] for row in optimizer_step.own_rows]
            tokens = sum(step.batch.tags[row].sampled_tokens for row in optimizer_step.rows)
            update = CriticBatch(
                **{name: columns.ragged(name).select(rows) for name in READS},
                extras=None if extras is None else extras.select(rows),
                whole_tokens=None if self.parallel is None else tokens,
            )
            reports.append(self.critic.update(update))
        return {}, mean_metrics(reports)
