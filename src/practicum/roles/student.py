"""The student role: logprobs of student and reference policy, and the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from practicum.errors import DataError, PracticumError
from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packing import RowExtras
from practicum.learning.update_batch import BatchFacts, TeacherColumns, TeacherSums, UpdateBatch
from practicum.learning.update_shares import PartShares
from practicum.observe.records.recorder import NOT_RECORDED, Recorder
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.teacher_sections import Route
from practicum.roles.advantages import dense_ids
from practicum.roles.padding import BatchCutter, rank_share
from practicum.roles.run_stage import StepInfo, stage
from practicum.roles.stage_table import OldSource
from practicum.teachers.balance import Moments, UpdateBalance, spread_factors
from practicum.teachers.ledger import Pair, TeacherMeasures, pair_of
from practicum.teachers.shared_tokens import require_mass

FRESH_ONLY = ("gap_mean", "gap_max", "gap_k3")
"""Metrics of the first optimizer step on a batch sampled by the current weights, meaningless in later
ones."""
STALE_ONLY = ("sample_size",)
"""The same for batches sampled by older weights."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Metrics, measures by teacher and domain with teachers, and the weight version."""

    metrics: dict[str, float]
    measured: TeacherMeasures | None
    version: int


class StudentRole:
    """The student's stages. Each rank reads its rows of the batch, and all return the same report."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        learner: Learner,
        reference: LogprobScorer | None,
        watch: Watch,
        cutter: BatchCutter,
        recorder: Recorder = NOT_RECORDED,
        *,
        temperature: float,
        old: OldSource,
        teachers: Mapping[str, int],
        route: Route,
    ) -> None:
        """`temperature` is the rollout's, `old` the ratio's denominator, `teachers` their numbers."""
        self.plan, self.store, self.watch, self.recorder = plan, store, watch, recorder
        self.learner, self.reference, self._temperature = learner, reference, temperature
        self.parallel, self.cutter = learner.parallel, cutter
        self._old, self._numbers, self._measure_every = old, teachers, route.measure_every
        self._balanced_by, targets = route.balanced_by, route.shares
        known = {teachers[name]: share for name, share in (targets or {}).items()}
        self.balance = UpdateBalance(known or None)

    @stage("old_logprobs", rows=rank_share)
    def old_logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """Return the student's logprobs before this step's update, at the rollout's temperature."""
        at, extras = self._temperature, RowExtras.of(columns)
        return {"old_logprobs": self.learner.scorer.logprobs(*ids_of(columns), temperature=at, extras=extras)}

    @stage("ref_logprobs", rows=rank_share)
    def ref_logprobs(self, batch: BatchRef, columns: Columns, step: StepInfo) -> dict[str, Column]:
        """Return the reference policy's logprobs, at the rollout's temperature."""
        assert self.reference is not None
        at, extras = self._temperature, RowExtras.of(columns)
        return {"ref_logprobs": self.reference.logprobs(*ids_of(columns), temperature=at, extras=extras)}

    @stage("update_student", rows=lambda self, step: self.cutter.rank_rows(self.cutter.student, step))
    def update(
        self, batch: BatchRef, columns: Columns, step: StepInfo
    ) -> tuple[dict[str, Column], UpdateReport]:
        """Take all optimizer steps on this batch. Checks may reject each before weights change."""
        self._check_masks(batch, columns)
        steps = self.cutter.optimizer_steps(self.cutter.student, step)
        rows_of_steps, version = [each.rows for each in steps], self.learner.version
        self.watch("masks", invariants.passes(step.batch, rows_of_steps, self.cutter.train.epochs))
        pairs = list(dict.fromkeys(pair_of(tags) for tags in step.batch.real().tags))
        every = self._measure_every if self._numbers and len(pairs) > 1 else 0
        sums, parts, whole = TeacherSums(), ((), None), self._facts(step.batch, batch, columns)
        extras = RowExtras.of(columns)
        feedback, factors = self._balanced_by == "update", None
        if self._balanced_by == "sigma":
            factors = spread_factors(self._moments(batch, columns))
        reports: list[dict[str, float]] = []
        row_tokens = packed = 0
        others = any(tags.version_min != version for tags in step.batch.real().tags)
        stale = self.plan.lag > 0 and others
        place = {key: i for i, key in enumerate(batch.keys)}
        unseen = {key for key, tags in batch if self.recorder.records and tags.recorded}
        for number, optimizer_step in enumerate(steps, start=1):
            rows = [place[step.batch.keys[row]] for row in optimizer_step.own_rows]
            facts, own = whole.select(optimizer_step.rows), whole.select(optimizer_step.own_rows)
            update = replace(
                self._update_batch(batch, columns, rows, own),
                groups=[pairs.index(pair_of(batch.tags[i])) for i in rows] if self._numbers else None,
                recorded=[batch.keys[i] in unseen for i in rows] if unseen else None,
                extras=None if extras is None else extras.select(rows),
                whole=None if self.parallel is None else facts,
            )
            if update.teachers is not None:
                used = self.balance.factors if feedback else factors
                update = replace(update, teachers=replace(update.teachers, factors=used))
            teaching, several = self.learner.objective.teaching, len(pairs) > 1
            measures = every and not reports and (step.number == 1 or step.number % every == 0)
            projects = teaching is not None and teaching.project
            measures = measures or (several and (projects or feedback))
            present = {pair_of(step.batch.tags[row]) for row in optimizer_step.rows} if measures else ()
            groups = [number for number, pair in enumerate(pairs) if pair in present]
            new_pairs = pairs if step.number == 1 and not reports else []
            check = partial(self._check, facts, new_pairs, first=not reports, stale=stale)
            try:
                learnt = self.learner.update(update, step=step.number, before_step=check, groups=groups)
                reports.append(learnt)
            finally:  # the numbers of a rejected update help to debug it
                if (trace := self.learner.trace) is not None and update.recorded is not None:
                    # With several passes over a row, the first is recorded.
                    kept = batch.take([row for row in rows if batch.keys[row] in unseen])
                    found = trace.columns()
                    self.recorder.add("update_student", kept, found, trained=step.number, update=number)
                unseen -= {batch.keys[row] for row in rows}
            sums.merge(self.learner.by_group)
            row_tokens, packed = row_tokens + self.learner.row_tokens, packed + self.learner.packed_tokens
            if groups:
                parts = [pairs[number] for number in groups], self.learner.shares
                if feedback:
                    self._adapt(parts[0], self.learner.shares, step.batch)
        measured = TeacherMeasures(pairs, sums, *parts) if self._numbers else None
        metrics = mean_metrics(reports, stale=stale)
        if row_tokens:
            metrics["shared/learn"] = 1 - packed / row_tokens
        return {}, UpdateReport(metrics, measured, self.learner.version)

    def _moments(self, batch: BatchRef, columns: Columns) -> dict[int, Moments]:
        """Return the moments of log teacher - log student by teacher, over all sampled tokens."""
        student = columns.ragged("rollout_logprobs" if "rollout_logprobs" in columns else "plain_logprobs")
        apart_N = (columns.ragged("teacher_logprobs").values - student.values).double()
        apart_rows, masks = Ragged.packed(apart_N, student.lengths).rows, columns.ragged("response_mask").rows
        own: dict[int, Moments] = {}
        for tags, apart, mask in zip(batch.tags, apart_rows, masks, strict=True):
            found, number = apart[mask], self._numbers.get(tags.teacher or "", 0)
            count, total, squares = own.get(number, (0, 0.0, 0.0))
            sums = float(found.sum()), float(found.square().sum())
            own[number] = count + len(found), total + sums[0], squares + sums[1]
        ranks = [own] if self.parallel is None else self.parallel.gather(own)
        joined: dict[int, Moments] = {}
        for number in sorted({number for found in ranks for number in found}):
            every = [found[number] for found in ranks if number in found]
            joined[number] = tuple(map(sum, zip(*every, strict=True)))  # pyright: ignore[reportArgumentType]
        return joined

    def _adapt(self, parts: Sequence[Pair], found: PartShares | None, batch: BatchRef) -> None:
        """Pass the measured shares of the update to the feedback control."""
        if found is None or not found.shares:
            raise PracticumError(
                "route.balance update needs AdamW's second moments to measure shares of the update"
                "\n  → set train.optimizer: adamw, or another route.balance"
            )
        shares = dict.fromkeys((self._numbers[teacher] for teacher, _ in parts), 0.0)
        for (teacher, _), share in zip(parts, found.shares, strict=True):
            shares[self._numbers[teacher]] += share
        asked = {(key.prompt, tags.teacher or "") for key, tags in batch.real()}
        self.balance.adapt(shares, Counter(self._numbers[teacher] for _, teacher in asked))

    def _check_masks(self, batch: BatchRef, columns: Columns) -> None:
        """Check the rows of each rank. All ranks raise if any finds a problem."""
        if not self.watch.looks_at("masks"):
            return
        findings = [invariants.masks(batch, *ids_of(columns), columns.ragged("response_mask"))]
        if self.parallel is not None:
            findings = self.parallel.gather(findings[0])
        self.watch("masks", next((finding for finding in findings if finding is not None), None))

    def _facts(self, batch: BatchRef, own: BatchRef, columns: Columns) -> BatchFacts:
        """Return the facts of the whole batch. `own` holds this rank's rows, with their columns."""
        sampled = [tags.sampled_tokens for tags in batch.tags]
        weights: list[float] = list(sampled)
        if "token_weight" in columns:
            weights = self._summed_weights(batch, own, columns)
        names, tokens = [key[:2] for key in batch.keys], Counter[tuple[int, ...]]()
        for name, weight in zip(names, weights, strict=True):
            tokens[name] += weight  # pyright: ignore[reportArgumentType]
        return BatchFacts(
            sessions=dense_ids(names)[0].tolist(),
            sampled_tokens=sampled,
            session_tokens=[tokens[name] for name in names],
            teachers=[self._numbers.get(tags.teacher or "", 0) for tags in batch.tags],
            weights=weights,
        )

    def _summed_weights(self, batch: BatchRef, own: BatchRef, columns: Columns) -> list[float]:
        """Return the sum of token_weight over the sampled tokens of each row of all ranks."""
        found: dict[Key, float] = {}
        rows = zip(columns.ragged("token_weight").rows, columns.ragged("response_mask").rows, strict=True)
        for key, (weight, mask) in zip(own.keys, rows, strict=True):
            if not bool((weight.isfinite() & (weight >= 0)).all()):
                raise DataError(
                    f"token_weight of {key} contains {float(weight.min())}, expected numbers of at least 0"
                )
            found[key] = float(weight[mask].double().sum())
        ranks = [found] if self.parallel is None else self.parallel.gather(found)
        everywhere = {key: weight for sums in ranks for key, weight in sums.items()}
        return [everywhere.get(key, 0.0) for key in batch.keys]

    def _check(
        self,
        facts: BatchFacts,
        new_pairs: Sequence[Pair],
        metrics: Mapping[str, float],
        *,
        first: bool,
        stale: bool,
    ) -> None:
        """Raise on invalid numbers of an optimizer step, before the weights change. `new_pairs` are the pairs
        of teacher and domain in the first step of a run, otherwise none."""
        for number, (teacher, _) in enumerate(new_pairs):
            sums = self.learner.by_group.sums.get(number, {})
            if "shared_mass" in sums and sums["coverage"]:
                require_mass(teacher, sums["shared_mass"] / sums["coverage"])
        self.watch("masks", invariants.denominator(metrics.get("tokens"), sum(facts.sampled_tokens)))
        expected = total_weight(self.learner.objective.algorithm.aggregation, facts)
        self.watch("masks", invariants.loss_weights(self.learner.weight, expected))
        if first and stale:
            self.watch("sample_size", invariants.sample_size(metrics))
        elif first:
            self.watch("logprob_gap", invariants.logprob_gap(metrics, self.watch.logprob_gap_max))

    def _update_batch(
        self, batch: BatchRef, columns: Columns, rows: Sequence[int], facts: BatchFacts
    ) -> UpdateBatch:
        teachers = None
        if "teacher_logprobs" in columns:
            teachers = TeacherColumns(
                teacher=[self._numbers[batch.tags[row].teacher or ""] for row in rows],
                logprobs=columns.ragged("teacher_logprobs").select(rows),
                topk_ids=columns.select("teacher_topk_ids", rows),
                topk_logprobs=columns.select("teacher_topk_logprobs", rows),
                hidden=columns.select("teacher_hidden", rows),
                match=columns.select("teacher_match", rows),
                weight=columns.select("teacher_weight", rows),
            )
        plain = columns.select("plain_logprobs", rows)
        return UpdateBatch(
            prompt_ids=columns.ragged("prompt_ids").select(rows),
            response_ids=columns.ragged("response_ids").select(rows),
            response_mask=columns.ragged("response_mask").select(rows),
            sessions=facts.sessions,
            advantages=columns.select("advantages", rows),
            old_logprobs=None if self._old == "own" else columns.select(self._old, rows),
            rollout_logprobs=columns.select("rollout_logprobs", rows) if plain is None else None,
            plain_logprobs=plain,
            ref_logprobs=columns.select("ref_logprobs", rows),
            teachers=teachers,
            session_tokens=facts.session_tokens,
            token_weight=columns.select("token_weight", rows),
        )


def ids_of(columns: Columns) -> tuple[Ragged, Ragged]:
    return columns.ragged("prompt_ids"), columns.ragged("response_ids")


def total_weight(aggregation: str, facts: BatchFacts) -> float:
    """Return the sum of the token weights of a mini-batch, from the facts of its rows."""
    whole = dict(zip(facts.sessions, facts.session_tokens, strict=True))
    tokens: dict[int, float] = {}
    for session, weight in zip(facts.sessions, facts.weights, strict=True):
        tokens[session] = tokens.get(session, 0) + weight
    present = [session for session, count in tokens.items() if count]
    tokens_S = torch.tensor([tokens[session] for session in present])
    divisor = find_part("aggregation", aggregation, AGGREGATIONS)
    divisor_S = divisor(tokens_S, torch.tensor([whole[session] for session in present]))
    return float((tokens_S / divisor_S).sum())


def mean_metrics(reports: Sequence[Mapping[str, float]], *, stale: bool = False) -> dict[str, float]:
    """Return the mean of each metric over optimizer steps. `stale` means older weights sampled the batch."""
    means = {}
    first, none = (STALE_ONLY, FRESH_ONLY) if stale else (FRESH_ONLY, STALE_ONLY)
    for name in dict.fromkeys(name for report in reports for name in report if name not in none):
        values = [r[name] for r in (reports[:1] if name in first else reports) if name in r]
        if values:
            means[name] = sum(values) / len(values)
    return means
