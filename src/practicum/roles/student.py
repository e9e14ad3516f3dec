"""The student role: logprobs of the learner and the reference, and the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from practicum.algorithms.aggregation import AGGREGATIONS
from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.ragged import Column, Columns, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.learning.distill_loss import TeacherColumns
from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.minibatches import student_cut
from practicum.learning.packing import RowExtras
from practicum.learning.update_batch import BatchFacts, UpdateBatch
from practicum.learning.update_metrics import TeacherSums
from practicum.recipe.derived import lag, teacher_numbers
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recording_store import record_more, recorder_of
from practicum.roles.advantages import dense_ids
from practicum.roles.padding import (
    OptimizerStep,
    optimizer_steps,
    rank_rows,
    rank_share,
    session_tokens,
    whole_sessions,
)
from practicum.roles.run_stage import StepInfo, stage
from practicum.roles.stage_table import compares_sampled, ratio_source
from practicum.teachers.ledger import TeacherMeasures, pair_of

FRESH_ONLY = ("gap_mean", "gap_max", "gap_k3")
"""Metrics that mean something only before the batch's first optimizer step, if these weights sampled it."""
STALE_ONLY = ("sample_size",)
"""The same, of batches that older weights sampled."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Metrics, the numbers of each teacher and domain if there are teachers, and the weights' version."""

    metrics: dict[str, float]
    measured: TeacherMeasures | None
    version: int


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What all optimizer steps of a batch are made from: this rank's rows, and facts of all rows."""

    batch: BatchRef
    columns: Columns
    extras: RowExtras | None
    step: StepInfo
    facts: BatchFacts
    pairs: list[tuple[str, str]]
    """Each teacher and domain that is in the whole batch."""

    def own_places(self, optimizer_step: OptimizerStep) -> list[int]:
        """Where this rank's rows of an optimizer step are among its rows."""
        place = {key: i for i, key in enumerate(self.batch.keys)}
        return [place[self.step.batch.keys[row]] for row in optimizer_step.own_rows]


class StudentRole:
    """The student's stages.

    On several ranks each is called on all of them at once with the same whole batch, padding included; a rank
    reads its own rows, and all give the same report.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        learner: Learner,
        reference: LogprobScorer | None,
        watch: Watch,
    ) -> None:
        self.recipe, self.plan, self.store, self.watch = recipe, plan, store, watch
        self.learner, self.reference = learner, reference
        self.parallel = learner.parallel
        self.on_gradient: Callable[[], None] | None = None
        """Called before each optimizer step, when the gradients lie on the parameters."""
        self._old, self._compares_sampled = ratio_source(recipe), compares_sampled(recipe)
        self._numbers = teacher_numbers(recipe)

    @stage("old_logprobs", rows=rank_share)
    def old_logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """The student's logprobs before this step's update, at the rollout's temperature."""
        return {"old_logprobs": self._logprobs(self.learner.scorer, columns)}

    @stage("ref_logprobs", rows=rank_share)
    def ref_logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """The reference policy's logprobs, at the rollout's temperature."""
        assert self.reference is not None
        return {"ref_logprobs": self._logprobs(self.reference, columns)}

    def _logprobs(self, scorer: LogprobScorer, columns: Columns) -> Ragged:
        temperature, extras = self.recipe.rollout.temperature, RowExtras.of(columns)
        ids = columns.ragged("prompt_ids"), columns.ragged("response_ids")
        return scorer.logprobs(*ids, temperature=temperature, extras=extras)

    def _optimizer_steps(self, step: StepInfo) -> list[OptimizerStep]:
        whole = whole_sessions(self.recipe)
        return optimizer_steps(self.recipe, student_cut(self.recipe), step, self.parallel, whole=whole)

    def _update_rows(self, step: StepInfo) -> BatchRef:
        return rank_rows(step.batch, self._optimizer_steps(step))

    @stage("update_student", rows=_update_rows)
    def update(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], UpdateReport]:
        """All optimizer steps on this batch; checks may refuse each before weights change."""
        self._check_masks(batch, columns)
        steps = self._optimizer_steps(step)
        epochs = self.recipe.train.epochs
        self.watch("masks", invariants.passes(step.batch, [one.rows for one in steps], epochs))
        pairs = list(dict.fromkeys(pair_of(tags) for tags in step.batch.real().tags))
        inputs = _StepInputs(batch, columns, RowExtras.of(columns), step, self._facts(step.batch), pairs)
        sums, norms = TeacherSums(), ({}, {})
        self.learner.step = step.number - 1
        reports: list[dict[str, float]] = []
        records = recorder_of(self.store) is not None
        version = self.learner.version
        stale = lag(self.recipe) > 0 and any(tags.version_min != version for tags in step.batch.real().tags)
        unseen = {key for key, tags in batch if records and tags.recorded}
        for number, optimizer_step in enumerate(steps, start=1):
            update = self._update_batch(inputs, optimizer_step, unseen)
            if not reports and len(pairs) > 1 and self._measures_gradients(step.number):
                norms = self._gradient_norms(update, step.batch, optimizer_step)
            facts = inputs.facts.select(optimizer_step.rows)
            self.learner.stepper.before_step = partial(self._check, facts, first=not reports, stale=stale)
            try:
                reports.append(self.learner.update(update))
            finally:  # the numbers of an update that is refused are those that people look for
                self._record(inputs, optimizer_step, update, number)
                unseen -= {step.batch.keys[row] for row in optimizer_step.own_rows}
            sums.merge(self.learner.by_group)
        measured = TeacherMeasures(pairs, sums, *norms) if self._numbers else None
        return {}, UpdateReport(mean_metrics(reports, stale=stale), measured, self.learner.version)

    def _record(
        self, inputs: _StepInputs, optimizer_step: OptimizerStep, update: UpdateBatch, number: int
    ) -> None:
        """What the update did to the tokens of recorded rows; of several passes over a row, the first."""
        if (trace := self.learner.trace) is None or update.recorded is None:
            return
        places = inputs.own_places(optimizer_step)
        rows = inputs.batch.take([place for place, kept in zip(places, update.recorded, strict=True) if kept])
        more = {"trained": inputs.step.number, "update": number}
        record_more(self.store, "update_student", rows, trace.columns(), **more)

    def _check_masks(self, batch: BatchRef, columns: Columns) -> None:
        """Each rank checks its own rows, and all of them act on what any finds."""
        if not self.watch.looks_at("masks"):
            return
        ids = (columns.ragged("prompt_ids"), columns.ragged("response_ids"))
        findings = [invariants.masks(batch, *ids, columns.ragged("response_mask"))]
        if self.parallel is not None:
            findings = self.parallel.gather(findings[0])
        self.watch("masks", next((finding for finding in findings if finding is not None), None))

    def _facts(self, batch: BatchRef) -> BatchFacts:
        """What the tags of a batch say of each row."""
        session_B, _ = dense_ids([key[:2] for key in batch.keys])
        return BatchFacts(
            sessions=session_B.tolist(),
            sampled_tokens=[tags.sampled_tokens for tags in batch.tags],
            session_tokens=session_tokens(batch),
            teachers=[self._numbers.get(tags.teacher or "", 0) for tags in batch.tags],
        )

    def _measures_gradients(self, step: int) -> bool:
        every = self.recipe.route.measure_every
        return bool(self._numbers) and every > 0 and (step == 1 or step % every == 0)

    def _gradient_norms(
        self, update: UpdateBatch, batch: BatchRef, optimizer_step: OptimizerStep
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Norm of the gradient of each teacher's and of each domain's rows."""
        place = {row: i for i, row in enumerate(optimizer_step.own_rows)}
        by_teacher: dict[str, list[int]] = {}
        by_domain: dict[str, list[int]] = {}
        for row in optimizer_step.rows:
            tags = batch.tags[row]
            by_teacher.setdefault(tags.teacher or "", []).append(row)
            by_domain.setdefault(tags.domain, []).append(row)

        def norms(groups: dict[str, list[int]]) -> dict[str, float]:
            own = [[place[row] for row in rows if row in place] for rows in groups.values()]
            return dict(zip(groups, self.learner.gradient_norms(update, own), strict=True))

        of_teachers = norms(by_teacher)
        if list(by_teacher.values()) == list(by_domain.values()):
            return of_teachers, dict(zip(by_domain, of_teachers.values(), strict=True))
        return of_teachers, norms(by_domain)

    def _check(self, facts: BatchFacts, metrics: Mapping[str, float], *, first: bool, stale: bool) -> None:
        """Refuse an optimizer step whose numbers are not in order; weights are untouched so far."""
        self.watch("masks", invariants.denominator(metrics.get("tokens"), sum(facts.sampled_tokens)))
        expected = total_weight(self.recipe.algorithm.aggregation, facts)
        self.watch("masks", invariants.loss_weights(self.learner.weight, expected))
        checks = self.recipe.checks
        if first and stale:
            self.watch("sample_size", invariants.sample_size(metrics, checks.sample_size_min))
        elif first:
            self.watch("logprob_gap", invariants.logprob_gap(metrics, checks.logprob_gap_max))
        if self.on_gradient is not None:
            self.on_gradient()

    def _update_batch(
        self, inputs: _StepInputs, optimizer_step: OptimizerStep, unseen: Collection[Key]
    ) -> UpdateBatch:
        """The rows of an optimizer step; `unseen` are those to be recorded that no earlier one had."""
        columns, own = inputs.columns, inputs.facts.select(optimizer_step.own_rows)
        rows = inputs.own_places(optimizer_step)
        pairs = [inputs.pairs.index(pair_of(inputs.batch.tags[i])) for i in rows]
        return UpdateBatch(
            prompt_ids=columns.ragged("prompt_ids").select(rows),
            response_ids=columns.ragged("response_ids").select(rows),
            response_mask=columns.ragged("response_mask").select(rows),
            sessions=own.sessions,
            advantages=columns.select("advantages", rows),
            old_logprobs=None if self._old == "own" else columns.select(self._old, rows),
            rollout_logprobs=columns.select("rollout_logprobs", rows) if self._compares_sampled else None,
            plain_logprobs=columns.select("plain_logprobs", rows),
            ref_logprobs=columns.select("ref_logprobs", rows),
            teachers=self._teachers(inputs.batch, columns, rows),
            groups=pairs if self._numbers else None,
            session_tokens=own.session_tokens,
            extras=None if inputs.extras is None else inputs.extras.select(rows),
            recorded=[inputs.batch.keys[i] in unseen for i in rows] if unseen else None,
            whole=None if self.parallel is None else inputs.facts.select(optimizer_step.rows),
        )

    def _teachers(self, batch: BatchRef, columns: Columns, rows: Sequence[int]) -> TeacherColumns | None:
        if "teacher_logprobs" not in columns:
            return None
        return TeacherColumns(
            teacher=[self._numbers[batch.tags[row].teacher or ""] for row in rows],
            logprobs=columns.ragged("teacher_logprobs").select(rows),
            topk_ids=columns.select("teacher_topk_ids", rows),
            topk_logprobs=columns.select("teacher_topk_logprobs", rows),
            hidden=columns.select("teacher_hidden", rows),
        )


def total_weight(aggregation: str, facts: BatchFacts) -> float:
    """What the weights of a mini-batch's tokens add up to, by its tags alone."""
    assert facts.session_tokens is not None
    whole = dict(zip(facts.sessions, facts.session_tokens, strict=True))
    tokens = Counter[int]()
    for session, sampled in zip(facts.sessions, facts.sampled_tokens, strict=True):
        tokens[session] += sampled
    present = [session for session, count in tokens.items() if count]
    tokens_S = torch.tensor([tokens[session] for session in present])
    divisor = find_part("aggregation", aggregation, AGGREGATIONS)
    divisor_S = divisor(tokens_S, torch.tensor([whole[session] for session in present]))
    return float((tokens_S / divisor_S).sum())


def mean_metrics(reports: Sequence[Mapping[str, float]], *, stale: bool = False) -> dict[str, float]:
    """Mean over optimizer steps of what each of them measured; `stale`: older weights sampled the batch."""
    means = {}
    first, none = (STALE_ONLY, FRESH_ONLY) if stale else (FRESH_ONLY, STALE_ONLY)
    for name in dict.fromkeys(name for report in reports for name in report if name not in none):
        values = [r[name] for r in (reports[:1] if name in first else reports) if name in r]
        if values:
            means[name] = sum(values) / len(values)
    return means
