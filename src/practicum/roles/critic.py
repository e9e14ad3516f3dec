"""The critic role: compute values for the advantages, and update the critic afterwards."""

from __future__ import annotations

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Column, Columns
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.learning.packing import RowExtras
from practicum.learning.update_batch import CriticBatch
from practicum.learning.value_learner import ValueLearner
from practicum.observe.records.recorder import NOT_RECORDED, Recorder
from practicum.roles.padding import BatchCutter, rank_share
from practicum.roles.run_stage import StepInfo, stage
from practicum.roles.student import ids_of, mean_metrics

READS = ("prompt_ids", "response_ids", "response_mask", "values", "returns")
"""The columns of the critic's update."""


class CriticRole:
    """The critic's stages. On several ranks, they work like those of `StudentRole`."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        critic: ValueLearner,
        cutter: BatchCutter,
        recorder: Recorder = NOT_RECORDED,
    ) -> None:
        self.plan, self.store, self.critic, self.cutter = plan, store, critic, cutter
        self.parallel, self.recorder = critic.parallel, recorder

    @stage("values", rows=rank_share)
    def values(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        return {"values": self.critic.values(*ids_of(columns), extras=RowExtras.of(columns))}

    @stage("update_critic", rows=lambda self, step: self.cutter.rank_rows(self.cutter.critic, step))
    def update(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], dict[str, float]]:
        extras, place = RowExtras.of(columns), {key: i for i, key in enumerate(batch.keys)}
        reports = []
        for optimizer_step in self.cutter.optimizer_steps(self.cutter.critic, step):
            rows = [place[step.batch.keys[row]] for row in optimizer_step.own_rows]
            tokens = sum(step.batch.tags[row].sampled_tokens for row in optimizer_step.rows)
            update = CriticBatch(
                **{name: columns.ragged(name).select(rows) for name in READS},
                extras=None if extras is None else extras.select(rows),
                whole_tokens=None if self.parallel is None else tokens,
            )
            reports.append(self.critic.update(update, step=step.number))
        return {}, mean_metrics(reports)
