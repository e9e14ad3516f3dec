"""A stage from outside, with a field of its own: what a user would write in a module of theirs."""

from __future__ import annotations

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import Field, register_field
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stages import Columns, StageSpec, StepInfo, stage
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.learner_rows import rank_share
from practicum.roles.train_rank import TrainRank

register_field(Field("surprise", "float32", "response", "surprise", "minus the logprob", padding="zero"))


def surprise(recipe: Recipe) -> StageSpec:
    """The line of the stage table."""
    reads, writes = ("rollout_logprobs", "response_mask"), ("surprise",)
    use = "tests.trainer.own_stage:SurpriseRole"
    return StageSpec("surprise", reads, writes, effect=True, about="minus logprobs", use=use)


def mean_surprise(recipe: Recipe) -> StageSpec:
    """A second stage, of the same role, that reads the first one's field on the first rank."""
    use = "tests.trainer.own_stage:SurpriseRole"
    return StageSpec("mean_surprise", ("surprise",), (), ranks="first", effect=True, use=use)


class SurpriseRole:
    """Writes how surprising each token was, and reports the mean of the whole batch."""

    def __init__(self, rank: TrainRank) -> None:
        self.plan, self.store, self.parallel = rank.plan, rank.store, rank.parallel

    @stage("surprise", rows=rank_share)
    def write(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        logprobs = columns.ragged("rollout_logprobs")
        return {"surprise": Ragged.packed(-logprobs.values, logprobs.lengths)}

    @stage("mean_surprise")
    def read(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], dict[str, float]]:
        values = columns.ragged("surprise").values
        return {}, {"mean": float(values.double().mean()), "rows": len(batch), "step": step.number}
