"""The student role: logprobs of the learner and the reference, and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan, old_source
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.learning.distill_loss import TeacherColumns
from practicum.learning.learner import Learner
from practicum.learning.logprob_scorer import LogprobScorer
from practicum.learning.minibatches import student_cut
from practicum.learning.row_extras import RowExtras
from practicum.learning.teacher_sums import TeacherSums
from practicum.learning.update_batch import BatchFacts, UpdateBatch
from practicum.recipe.derived import teacher_numbers
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.advantages import dense_ids
from practicum.roles.optimizer_steps import (
    OptimizerStep,
    optimizer_steps,
    rank_rows,
    rank_share,
    session_tokens,
    whole_sessions,
)
from practicum.roles.stage_extras import extras_of
from practicum.teachers.ledger import TeacherMeasures, pair_of

FRESH_ONLY = ("gap_mean", "gap_max", "gap_k3")
"""Metrics that mean something only before the batch's first optimizer step."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update reports: metrics, and the numbers of each teacher and domain if there are teachers."""

    metrics: dict[str, float]
    measured: TeacherMeasures | None


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What all optimizer steps of a batch are made from: the rows that are here, and facts of all rows."""

    part: BatchRef
    columns: Columns
    extras: RowExtras | None
    facts: BatchFacts
    pairs: list[tuple[str, str]]
    """Each teacher and domain that is in the batch."""


class StudentRole:
    """The learner's stages.

    On several ranks each is called on all of them at once with the same whole batch, padding included; a rank
    reads its own rows, and all give the same answer.
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
        self._old = old_source(recipe)
        self._numbers = teacher_numbers(recipe)

    def old_logprobs(self, batch: BatchRef) -> None:
        """The student's logprobs before this step's update, at the rollout's temperature."""
        self._old_logprobs(rank_share(batch, self.parallel))

    def ref_logprobs(self, batch: BatchRef) -> None:
        """The reference policy's logprobs, at the rollout's temperature."""
        self._ref_logprobs(rank_share(batch, self.parallel))

    def update(self, batch: BatchRef, *, step: int) -> UpdateReport | None:
        """All optimizer steps on this batch; checks may refuse each before weights change."""
        whole = whole_sessions(self.recipe)
        steps = optimizer_steps(
            self.recipe, student_cut(self.recipe), batch, step, self.parallel, whole=whole
        )
        part, mine = rank_rows(batch, steps)
        return self._update(part, batch, list(zip(steps, mine, strict=True)), step)

    @stage("old_logprobs")
    def _old_logprobs(self, batch: BatchRef, columns: Columns) -> dict[str, Column]:
        result = self.learner.logprobs(
            columns.ragged("prompt_ids"),
            columns.ragged("response_ids"),
            temperature=self.recipe.rollout.temperature,
            extras=extras_of(columns, batch),
        )
        return {"old_logprobs": result.logprobs}

    @stage("ref_logprobs")
    def _ref_logprobs(self, batch: BatchRef, columns: Columns) -> dict[str, Column]:
        assert self.reference is not None
        result = self.reference.logprobs(
            columns.ragged("prompt_ids"),
            columns.ragged("response_ids"),
            temperature=self.recipe.rollout.temperature,
            extras=extras_of(columns, batch),
        )
        return {"ref_logprobs": result.logprobs}

    @stage("update_student")
    def _update(
        self,
        part: BatchRef,
        columns: Columns,
        batch: BatchRef,
        steps: Sequence[tuple[OptimizerStep, list[int]]],
        step: int,
    ) -> tuple[dict[str, Column], UpdateReport]:
        """`steps` have the rows of each optimizer step in `batch`, and this rank's in `part`."""
        self._check_masks(part, columns)
        pairs = list(dict.fromkeys(pair_of(tags) for tags in batch.real().tags))
        given = _StepInputs(part, columns, extras_of(columns, part), self._facts(batch), pairs)
        sums, norms = TeacherSums(), ({}, {})
        self.learner.step = step - 1
        taken: list[dict[str, float]] = []
        for turn, mine in steps:
            update = self._update_batch(given, turn, mine)
            if not taken and len(pairs) > 1 and self._measures_gradients(step):
                norms = self._gradient_norms(update, batch, turn)
            sampled = sum(batch.tags[row].sampled_tokens for row in turn.rows)
            self.learner.stepper.before_step = partial(self._check, sampled, fresh=not taken)
            taken.append(self.learner.update(update))
            sums.merge(self.learner.by_group)
        measured = TeacherMeasures(pairs, sums, *norms) if self._numbers else None
        return {}, UpdateReport(mean_metrics(taken), measured)

    def _check_masks(self, part: BatchRef, columns: Columns) -> None:
        """Ranks look at their own rows, and all of them act on what any has found."""
        if not self.watch.looks_at("masks"):
            return
        ids = (columns.ragged("prompt_ids"), columns.ragged("response_ids"))
        found = [invariants.masks(part, *ids, columns.ragged("response_mask"))]
        if self.parallel is not None:
            found = self.parallel.gather(found[0])
        self.watch("masks", next((finding for finding in found if finding is not None), None))

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
        self, update: UpdateBatch, batch: BatchRef, turn: OptimizerStep
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Norm of the gradient of each teacher's and of each domain's rows."""
        place = {row: i for i, row in enumerate(turn.mine)}
        by_teacher: dict[str, list[int]] = {}
        by_domain: dict[str, list[int]] = {}
        for row in turn.rows:
            tags = batch.tags[row]
            by_teacher.setdefault(tags.teacher or "", []).append(row)
            by_domain.setdefault(tags.domain, []).append(row)

        def norms(groups: dict[str, list[int]]) -> dict[str, float]:
            here = [[place[row] for row in rows if row in place] for rows in groups.values()]
            return dict(zip(groups, self.learner.gradient_norms(update, here), strict=True))

        found = norms(by_teacher)
        if list(by_teacher.values()) == list(by_domain.values()):
            return found, dict(zip(by_domain, found.values(), strict=True))
        return found, norms(by_domain)

    def _check(self, sampled: int, metrics: Mapping[str, float], *, fresh: bool) -> None:
        """Refuse an optimizer step whose numbers are not in order; weights are untouched so far."""
        self.watch("masks", invariants.denominator(metrics.get("tokens"), sampled))
        if fresh:
            limit = self.recipe.checks.logprob_gap_max
            self.watch("logprob_gap", invariants.logprob_gap(metrics, limit))

    def _update_batch(self, given: _StepInputs, turn: OptimizerStep, mine: Sequence[int]) -> UpdateBatch:
        columns, own = given.columns, given.facts.select(turn.mine)

        def column(name: str) -> Ragged | None:
            return columns.ragged(name).select(mine) if name in columns else None

        pairs = [given.pairs.index(pair_of(given.part.tags[i])) for i in mine]
        return UpdateBatch(
            prompt_ids=columns.ragged("prompt_ids").select(mine),
            response_ids=columns.ragged("response_ids").select(mine),
            response_mask=columns.ragged("response_mask").select(mine),
            sessions=own.sessions,
            advantages=column("advantages"),
            old_logprobs=None if self._old == "own" else column(self._old),
            plain_logprobs=column("plain_logprobs"),
            ref_logprobs=column("ref_logprobs"),
            teachers=self._teachers(given.part, columns, mine),
            groups=pairs if self._numbers else None,
            session_tokens=own.session_tokens,
            extras=None if given.extras is None else given.extras.select(mine),
            whole=None if self.parallel is None else given.facts.select(turn.rows),
        )

    def _teachers(self, part: BatchRef, columns: Columns, rows: Sequence[int]) -> TeacherColumns | None:
        if "teacher_logprobs" not in columns:
            return None

        def column(name: str) -> Ragged | None:
            return columns.ragged(name).select(rows) if name in columns else None

        return TeacherColumns(
            teacher=[self._numbers[part.tags[row].teacher or ""] for row in rows],
            logprobs=columns.ragged("teacher_logprobs").select(rows),
            topk_ids=column("teacher_topk_ids"),
            topk_logprobs=column("teacher_topk_logprobs"),
            hidden=column("teacher_hidden"),
        )


def mean_metrics(taken: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps of what each of them measured."""
    names = dict.fromkeys(name for metrics in taken for name in metrics)
    means = {}
    for name in names:
        found = [m[name] for m in (taken[:1] if name in FRESH_ONLY else taken) if name in m]
        if found:
            means[name] = sum(found) / len(found)
    return means
