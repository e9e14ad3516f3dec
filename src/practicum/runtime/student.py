"""The student role: logprobs of the learner and the reference, and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan, old_source
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stage import Columns, stage
from practicum.dataplane.store import Store
from practicum.learning.batch import UpdateBatch
from practicum.learning.groups import GroupSums
from practicum.learning.learner import Learner
from practicum.learning.minibatches import student_cut
from practicum.learning.scorer import Scorer
from practicum.learning.teaching import TeacherColumns
from practicum.recipe.schema import Recipe
from practicum.recipe.ways import teacher_numbers
from practicum.runtime.credit import dense_ids
from practicum.runtime.cutting import minibatches, session_tokens, whole_sessions
from practicum.runtime.extras import extras_of
from practicum.teachers.ledger import Measured, pair_of

FRESH_ONLY = ("gap_mean", "gap_max", "gap_k3")
"""Metrics that mean something only before the batch's first optimizer step."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """What an update reports: metrics, and the numbers of each teacher and domain if there are teachers."""

    metrics: dict[str, float]
    measured: Measured | None


class Student:
    """The learner's stages."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        learner: Learner,
        reference: Scorer | None,
        watch: Watch,
    ) -> None:
        self.recipe, self.plan, self.store, self.watch = recipe, plan, store, watch
        self.learner, self.reference = learner, reference
        self._old = old_source(recipe)
        self._numbers = teacher_numbers(recipe)

    @stage("old_logprobs")
    def old_logprobs(self, batch: BatchRef, columns: Columns) -> dict[str, Column]:
        """The student's logprobs before this step's update, at the rollout's temperature."""
        result = self.learner.logprobs(
            columns.ragged("prompt_ids"),
            columns.ragged("response_ids"),
            temperature=self.recipe.rollout.temperature,
            extras=extras_of(columns, batch),
        )
        return {"old_logprobs": result.logprobs}

    @stage("ref_logprobs")
    def ref_logprobs(self, batch: BatchRef, columns: Columns) -> dict[str, Column]:
        """The reference policy's logprobs, at the rollout's temperature."""
        assert self.reference is not None
        result = self.reference.logprobs(
            columns.ragged("prompt_ids"),
            columns.ragged("response_ids"),
            temperature=self.recipe.rollout.temperature,
            extras=extras_of(columns, batch),
        )
        return {"ref_logprobs": result.logprobs}

    @stage("update_student")
    def update(self, batch: BatchRef, columns: Columns, *, step: int) -> tuple[dict[str, Column], Learnt]:
        """All optimizer steps on this batch; checks may refuse each before weights change."""
        if self.watch.looks_at("masks"):
            ids = (columns.ragged("prompt_ids"), columns.ragged("response_ids"))
            self.watch("masks", invariants.masks(batch, *ids, columns.ragged("response_mask")))
        session_B, _ = dense_ids([key[:2] for key in batch.keys])
        pairs = list(dict.fromkeys(pair_of(tags) for tags in batch.tags))
        sums, norms = GroupSums(), ({}, {})
        self.learner.step = step - 1
        taken: list[dict[str, float]] = []
        extras, tokens = extras_of(columns, batch), session_tokens(batch)
        whole = whole_sessions(self.recipe)
        for rows in minibatches(self.recipe, student_cut(self.recipe), batch, step, whole=whole):
            update = replace(
                self._update_batch(batch, columns, session_B, rows, pairs),
                session_tokens=[tokens[row] for row in rows],
                extras=None if extras is None else extras.select(rows),
            )
            if not taken and len(pairs) > 1 and self._measures_gradients(step):
                norms = self._gradient_norms(update, batch.take(rows))
            sampled = sum(batch.tags[row].sampled_tokens for row in rows)
            self.learner.stepper.before_step = partial(self._check, sampled, fresh=not taken)
            taken.append(self.learner.update(update))
            sums.merge(self.learner.by_group)
        measured = Measured(pairs, sums, *norms) if self._numbers else None
        return {}, Learnt(mean_metrics(taken), measured)

    def _measures_gradients(self, step: int) -> bool:
        every = self.recipe.route.measure_every
        return bool(self._numbers) and every > 0 and (step == 1 or step % every == 0)

    def _gradient_norms(
        self, update: UpdateBatch, rows: BatchRef
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Norm of the gradient of each teacher's and of each domain's rows."""
        by_teacher: dict[str, list[int]] = {}
        by_domain: dict[str, list[int]] = {}
        for i, tags in enumerate(rows.tags):
            by_teacher.setdefault(tags.teacher or "", []).append(i)
            by_domain.setdefault(tags.domain, []).append(i)
        norms = dict(
            zip(by_teacher, self.learner.gradient_norms(update, list(by_teacher.values())), strict=True)
        )
        if list(by_teacher.values()) == list(by_domain.values()):
            return norms, dict(zip(by_domain, norms.values(), strict=True))
        domain_norms = self.learner.gradient_norms(update, list(by_domain.values()))
        return norms, dict(zip(by_domain, domain_norms, strict=True))

    def _check(self, sampled: int, metrics: Mapping[str, float], *, fresh: bool) -> None:
        """Refuse an optimizer step whose numbers are not in order; weights are untouched so far."""
        self.watch("masks", invariants.denominator(metrics.get("tokens"), sampled))
        if fresh:
            limit = self.recipe.checks.logprob_gap_max
            self.watch("logprob_gap", invariants.logprob_gap(metrics, limit))

    def _update_batch(
        self,
        batch: BatchRef,
        columns: Columns,
        session_B: Tensor,
        rows: Sequence[int],
        pairs: Sequence[tuple[str, str]],
    ) -> UpdateBatch:
        def column(name: str) -> Ragged | None:
            return columns.ragged(name).select(rows) if name in columns else None

        return UpdateBatch(
            prompt_ids=columns.ragged("prompt_ids").select(rows),
            response_ids=columns.ragged("response_ids").select(rows),
            response_mask=columns.ragged("response_mask").select(rows),
            sessions=[int(session_B[row]) for row in rows],
            advantages=column("advantages"),
            old_logprobs=None if self._old == "own" else column(self._old),
            plain_logprobs=column("plain_logprobs"),
            ref_logprobs=column("ref_logprobs"),
            teachers=self._teachers(batch, columns, rows),
            groups=[pairs.index(pair_of(batch.tags[row])) for row in rows] if self._numbers else None,
        )

    def _teachers(self, batch: BatchRef, columns: Columns, rows: Sequence[int]) -> TeacherColumns | None:
        if "teacher_logprobs" not in columns:
            return None

        def column(name: str) -> Ragged | None:
            return columns.ragged(name).select(rows) if name in columns else None

        return TeacherColumns(
            teacher=[self._numbers[batch.tags[row].teacher or ""] for row in rows],
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
