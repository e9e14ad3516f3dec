"""The padding role: add rows without effect, so that mini-batches and ranks divide a batch evenly.

`dataplane/columns.py` defines the contents of padding rows, and `learning/minibatches.py` the mini-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import padding_batch
from practicum.dataplane.ragged import Column, Columns
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.errors import RecipeError
from practicum.learning.minibatches import Cut, assign_ranks, partition, spare_padding, spread
from practicum.learning.parallel import Parallel
from practicum.models.experts import routes_of
from practicum.models.vision import AXES
from practicum.observe.records.recorder import NOT_RECORDED, Recorder
from practicum.recipe.schema.recipe import Train
from practicum.recipe.schema.teacher_sections import Distill
from practicum.roles.run_stage import StepInfo, stage


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Rows of one optimizer step, as indices into the batch."""

    rows: list[int]
    """Real rows of the mini-batch."""
    own_rows: list[int]
    """Rows of this rank."""


class BatchCutter:
    """Pads batches, cuts them into optimizer steps, and divides these among the learner's ranks.

    The result depends only on keys and tags, so all ranks compute the same. With `whole_sessions`, the
    student's mini-batches split no session.
    """

    def __init__(
        self, train: Train, *, seed: int, whole_sessions: bool, rank: int = 0, ranks: int = 1
    ) -> None:
        self.train, self._seed, self.whole_sessions = train, seed, whole_sessions
        self.rank, self.ranks = rank, ranks
        # Two objects: only the student's mini-batches may need whole sessions.
        self.student, self.critic = (Cut(train.minibatches, train.minibatch_size) for _ in range(2))

    def padding_rows(self, batch: BatchRef) -> int:
        """Return the number of padding rows for even mini-batches and ranks."""
        spare = 0
        if self.ranks > 1 and self.whole_sessions:
            largest = max(Counter(key[:2] for key in batch.keys).values())
            spare = spare_padding(largest, self.student.steps(len(batch)), self.ranks)
        return spare + -(len(batch) + spare) % self.student.multiple(self.ranks)

    def optimizer_steps(self, cut: Cut, step: StepInfo) -> list[OptimizerStep]:
        """Return all optimizer steps of the batch. Raise ValueError if ranks can't divide the rows."""
        batch, steps, whole = step.batch, [], self.whole_sessions and cut is self.student
        prompts, sessions = [key.prompt for key in batch.keys], [key.session for key in batch.keys]
        padding, together = [tags.is_padding for tags in batch.tags], [key[:2] for key in batch.keys]
        for epoch in range(self.train.epochs):
            options = {"seed": self._seed, "step": step.number, "epoch": epoch, "ranks": self.ranks}
            minibatches = spread(prompts, sessions, padding, cut, whole_sessions=whole, **options)
            assigned = assign_ranks(minibatches, _tokens(batch), self.ranks, together if whole else None)
            for minibatch, parts in zip(minibatches, assigned, strict=True):
                real = set(minibatch.real)
                steps.append(OptimizerStep(minibatch.real, [row for row in parts[self.rank] if row in real]))
        return steps

    def rank_rows(self, cut: Cut, step: StepInfo) -> BatchRef:
        """Return this rank's rows of all optimizer steps, or a padding row if it has none."""
        steps = self.optimizer_steps(cut, step)
        rows = sorted({row for optimizer_step in steps for row in optimizer_step.own_rows})
        if not rows and steps:
            rows = [i for i, tags in enumerate(step.batch.tags) if tags.is_padding][:1]
        return step.batch.take(rows)


def rank_share(role: Any, step: StepInfo) -> BatchRef:
    """Return this rank's rows in a stage without mini-batches, with equal counts and balanced tokens."""
    parallel: Parallel | None = role.parallel
    if parallel is None:
        return step.batch
    return step.batch.take(partition(_tokens(step.batch), parallel.world)[parallel.rank])


def _tokens(batch: BatchRef) -> list[int]:
    return [tags.prompt_tokens + tags.response_tokens for tags in batch.tags]


class PaddingRole:
    """Adds padding rows to batches."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        widths: Mapping[str, int],
        cutter: BatchCutter,
        recorder: Recorder = NOT_RECORDED,
    ) -> None:
        self.plan, self.store, self.recorder = plan, store, recorder
        self.widths, self.cutter = widths, cutter
        assert isinstance(tokenizer.eos_token_id, int)
        self._end_id = tokenizer.eos_token_id

    @stage("pad")
    def pad(self, batch: BatchRef, columns: Columns, step: StepInfo) -> tuple[dict[str, Column], BatchRef]:
        """Write the padding rows of the step with all fields of later stages. Return the padded batch."""
        count = self.cutter.padding_rows(batch)
        if not count:
            return {}, batch.take([])
        options = {"end_id": self._end_id, "widths": self.widths}
        fields = list(dict.fromkeys(name for stage in self.plan for name in stage.writes))
        padding, written = padding_batch(batch.partition, count, fields, **options)
        self.store.put(padding, written)
        return {}, padding


def field_widths(distill: Distill | None, model: PreTrainedModel, teacher_width: int) -> dict[str, int]:
    """Return the sizes of fields' trailing axes, by their letters in the fields table."""
    widths = {"D": AXES}
    if distill is not None:
        widths |= {"K": distill.top_k, "H": teacher_width}
    if (routes := routes_of(model)) is not None:
        widths |= {"L": routes.layers, "E": routes.per_token}
    return widths


def check_fields(plan: Plan, model: PreTrainedModel) -> None:
    """Raise a RecipeError if experts must be replayed but the model can't record them."""
    if any("routed_experts" in stage.writes for stage in plan) and routes_of(model) is None:
        found = f"a {type(model).__name__}, whose routers can't be recorded and replayed"
        raise RecipeError("model", found, "another model")
