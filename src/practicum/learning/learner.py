"""The student in training: model, optimizer, and the update from a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.algorithms.aggregation import token_weights
from practicum.errors import CheckError
from practicum.learning.learner_checkpoint import TrainedModel
from practicum.learning.logprobs import LogprobScorer, token_logprobs
from practicum.learning.objective import (
    DistillSettings,
    Objective,
    multiplied_shares,
    share_factors,
    token_losses,
)
from practicum.learning.optimizer import Metrics, lr_at, stop_on_nonfinite
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import Packed, RowSpans
from practicum.learning.parallel import Parallel, whole, whole_tensors
from practicum.learning.update_batch import (
    TOP,
    RouterLoad,
    TeacherSums,
    TokenMeans,
    UpdateBatch,
    UpdateTrace,
    need_column,
    per_token,
    sessions_of,
    token_column,
)
from practicum.learning.update_shares import PartGradients, PartShares
from practicum.models.adapter_files import write_adapter
from practicum.models.fingerprint import LENGTH
from practicum.models.lora import base_fingerprint, merged_weights, trained_names
from practicum.models.model_files import save_description, write_model
from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.derived import EXPORTED
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train


class Learner(TrainedModel):
    """The student. `scorer` returns its logprobs without gradient.

    `temperature` is that of the rollouts. Supervised training is at temperature 1. Of the last update,
    `by_group` has sums by the batch's groups, `trace` the tokens of recorded rows, and `weight` the summed
    weights of the tokens in its loss. `row_tokens` are the input tokens of its rows, of which `packed_tokens`
    were computed.

    On several ranks (`parallel`) each has a shard of the weights and its rows of each mini-batch. Every
    method is then called on all ranks, and all get the same metrics.
    """

    NAME = "learner"

    def __init__(
        self,
        model: PreTrainedModel,
        train: Train,
        algorithm: Algorithm,
        *,
        temperature: float = 1.0,
        teaching: DistillSettings | None = None,
        on_nonfinite: Callable[[str], None] = stop_on_nonfinite,
        parallel: Parallel | None = None,
    ) -> None:
        self.model = model
        self.objective = Objective(algorithm, teaching)
        self.by_group, self.weight = TeacherSums(), 0.0
        self.row_tokens = self.packed_tokens = 0
        self.shares: PartShares | None = None
        self.trace: UpdateTrace | None = None
        self.temperature = 1.0 if algorithm.loss == "supervised" else temperature
        self._trained_names = trained_names(model)
        self._keeps_parts = parallel is None and model.device.type == "cpu"
        """False once a layer was found that does not keep the gradients of parts apart."""
        self.trunk = PackedModel(model, train, parallel)
        if self._trained_names is not None:
            self.base = base_fingerprint(model, whole)
        self.scorer = LogprobScorer(self.trunk)
        super().__init__(model, train, parallel, on_nonfinite)

    def update(
        self,
        batch: UpdateBatch,
        *,
        step: int = 1,
        before_step: Callable[[Metrics], None] | None = None,
        groups: Sequence[int] = (),
    ) -> Metrics:
        """Make one optimizer step on one mini-batch in training step `step`, and return its metrics.

        With `groups`, which are all that the batch's rows have, `shares` has what each had of the update.
        Layers keep the gradients of groups apart, or else these are back-propagated one after the other.

        The result does not depend on how rows fall into micro-batches. Without a sampled token nothing is
        done. With a non-finite loss or gradient the weights stay as they are. If `before_step` raises, they
        do so too. It is called when the gradients lie on the parameters.
        """
        trunk, halved = self.trunk, self.trunk.halved
        gather = None if self.parallel is None else self.parallel.gather
        project = self.objective.teaching is not None and self.objective.teaching.project
        parts = PartGradients(self.stepper.parameters, gather, project=project) if groups else None
        job = _Update(batch, self.objective, trunk, [groups.index(i) for i in batch.groups or () if groups])
        self.trace = job.trace
        if not job.tokens:
            return {"tokens": 0.0}
        report = _Report()
        for attempt in trunk.attempts():
            with attempt:
                self.stepper.optimizer.zero_grad(set_to_none=True)
                load = None if trunk.routes is None else RouterLoad(trunk.routes.experts)
                report = _Report(idle_tokens=job.idle_tokens, load=load)
                if parts is None:
                    self._accumulate(job, job.active, report, job.trace)
                elif self._keeps_parts:
                    job.rows.grads = parts.begin(len(groups))
                    self._accumulate(job, job.active, report, job.trace)
                    if any(p.grad is not None for p in self.stepper.parameters):
                        self._keeps_parts = False
                        return self.update(batch, step=step, before_step=before_step, groups=groups)
                else:
                    parts.begin()
                    for number in range(len(groups)):
                        rows = [row for row in job.active if job.rows.parts[row] == number]
                        self._accumulate(job, rows, report, job.trace)
                        parts.take()
                if parts is not None:
                    parts.put_sum()
                with torch.no_grad():
                    for packed in job.microbatches(trunk, job.idle):
                        self._loss(report, job, packed, job.trace)
        self.stepper.zero_missing_grads()
        report = self.join(report)
        self.by_group, self.weight = report.groups, report.weight
        self.row_tokens, self.packed_tokens = report.row_tokens, report.packed_tokens
        if job.trace is not None:
            job.trace.total = report.absolute
        if trunk.halved > halved:
            report.add("microbatch_halved", float(trunk.halved - halved))
        metrics = self.apply(report, lr_at(step, self.train), before_step, parts)
        self.shares = self.stepper.shares
        return metrics

    def _accumulate(
        self, job: _Update, rows: list[int], report: _Report, trace: UpdateTrace | None = None
    ) -> None:
        with self.trunk.training():
            for packed in job.microbatches(self.trunk, rows):
                with self.trunk.parted(packed):
                    self.trunk.backward(self._loss(report, job, packed, trace), packed)

    def _loss(
        self, report: _Report, job: _Update, packed: Packed, trace: UpdateTrace | None = None
    ) -> Tensor:
        columns, teaching = job.columns_of(packed), self.objective.teaching
        also = None
        if teaching is not None:
            also = teaching.reduce(columns, packed.target_M, self.temperature)
        with self.trunk.precision():
            found = token_logprobs(
                self.model,
                self.trunk.hidden(packed, report.load),
                packed.target_M,
                temperature=self.temperature,
                entropy=True,
                entropy_grad=self.objective.algorithm.entropy > 0,
                plain="plain_logprobs" in columns,
                logprobs_grad=self.objective.uses_logprobs or "sampled" in columns,
                also=also,
                top=None if trace is None else (columns["recorded"], TOP),
            )
        column_M, inserted = packed.column_M, None
        if (sampled_M := columns.pop("sampled", None)) is not None:
            inserted = -(columns["weights"] * found.logprobs_M)[~sampled_M].sum()
            found, column_M = found.select(sampled_M), column_M[sampled_M.cpu()]
            columns = {name: x[sampled_M] for name, x in columns.items()}
            report.add("inserted_loss", float(inserted.detach()))
        losses = token_losses(found, columns, columns["session"], self.objective, report.means)
        weighted_M = columns["weights"] * losses.loss_M
        loss = weighted_M.sum() if inserted is None else weighted_M.sum() + inserted
        report.tokens += len(column_M)
        report.row_tokens += packed.row_tokens
        report.packed_tokens += len(packed.ids_N)
        report.weight += float(columns["weights"].double().sum())
        report.add("loss", float(loss.detach()))
        report.absolute += float(weighted_M.detach().abs().sum())
        if trace is not None:
            trace.add(column_M, losses.numbers | {"loss": weighted_M}, losses.rules)
            trace.add_top(packed.column_M, "student", found.top)
            if losses.taught is not None and losses.taught.top:
                trace.add_top(packed.column_M, "teacher", losses.taught.top)
        if losses.policy_M is not None:
            report.add("policy_loss", float((columns["weights"] * losses.policy_M.detach()).sum()))
        taught = losses.taught
        no_gradient = taught is not None and taught.loss_M is not None and not taught.loss_M.requires_grad
        if no_gradient and torch.is_grad_enabled():
            raise CheckError("the divergence from the teachers has no gradient")
        if "group" in columns:
            report.groups.add(
                columns["group"],
                weight=columns["weights"],
                loss=weighted_M,
                entropy=found.entropy_M,
                kl=None if taught is None else taught.kl_M,
                overlap=None if taught is None else taught.overlap_M,
                entropy_gap=None if taught is None else taught.entropy_gap_M,
                coverage=None if taught is None else taught.known_M,
                shared_mass=None if taught is None else taught.mass_M,
            )
        return loss

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights without copying, tied ones once. On several ranks each is gathered when
        its turn comes: all ranks must go through them."""
        return whole_tensors(self.model, self._trained_names)

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights of a model without adapters, the adapter merged into them."""
        if self._trained_names is None:
            return self.named_weights()
        return merged_weights(self.model, whole)

    def fingerprint(self, length: int = LENGTH) -> Tensor:
        """Return logprobs [length - 1] of a fixed sequence, to compare with the engine's. Call it on all
        ranks."""
        return self.scorer.fingerprint(length)

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model and its tokenizer in HuggingFace format, on rank 0. An adapter is written in PEFT's
        format into the folder `adapter`, beside the model it is merged into."""
        rank = 0 if self.parallel is None else self.parallel.rank

        def gathered(weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
            # The other ranks take part in gathering each weight.
            return {name: x if self.parallel is None else x.cpu() for name, x in weights if rank == 0}

        if self.base is None:
            weights = gathered(whole_tensors(self.model))
            if rank == 0:
                self.model.save_pretrained(folder, state_dict=weights)
                tokenizer.save_pretrained(folder)
            return
        merged, adapter = gathered(self.plain_weights()), gathered(self.named_weights())
        if rank == 0:
            with TemporaryDirectory() as description:
                save_description(Path(description), self.model, tokenizer, None)
                write_model(Path(description), merged, folder)
            write_adapter(folder / EXPORTED, self.model, adapter, self.base)


@dataclass(slots=True)
class _Report:
    """Measurements of an update, over micro-batches and ranks."""

    tokens: int = 0
    idle_tokens: int = 0
    weight: float = 0.0
    totals: dict[str, float] = field(default_factory=lambda: {"loss": 0.0})
    means: TokenMeans = field(default_factory=TokenMeans)
    groups: TeacherSums = field(default_factory=TeacherSums)
    load: RouterLoad | None = None
    absolute: float = 0.0
    """Summed absolute losses of the tokens."""
    row_tokens: int = 0
    packed_tokens: int = 0

    def add(self, name: str, part: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + part

    def merge(self, other: _Report) -> None:
        self.tokens += other.tokens
        self.idle_tokens += other.idle_tokens
        self.absolute += other.absolute
        self.row_tokens += other.row_tokens
        self.packed_tokens += other.packed_tokens
        self.weight += other.weight
        for name, part in other.totals.items():
            self.add(name, part)
        self.means.merge(other.means)
        self.groups.merge(other.groups)
        if self.load is not None and other.load is not None:
            self.load.merge(other.load)

    def result(self) -> Metrics:
        loads = self.load.result() if self.load is not None else {}
        counts = {"tokens": float(self.tokens), "idle_tokens": self.idle_tokens / max(self.tokens, 1)}
        return counts | self.totals | self.means.result() | loads


class _Update:
    """One mini-batch, or this rank's rows of it, with everything known before the first backward pass."""

    def __init__(
        self, batch: UpdateBatch, objective: Objective, trunk: PackedModel, parts: Sequence[int]
    ) -> None:
        dtype, parallel = trunk.dtype, trunk.parallel
        assert (parallel is None) == (batch.whole is None), "a rank's rows come with the whole mini-batch"
        self.rows = RowSpans(batch.prompt_ids, batch.response_ids, batch.extras, parts)
        self.sampled_M = need_column(batch, "response_mask", "every update").bool()
        whole = batch.whole
        self.tokens = int(self.sampled_M.sum()) if whole is None else sum(whole.sampled_tokens)
        weight_M = token_column(batch, "token_weight")
        found = sessions_of(batch, self.sampled_M, weight_M)
        learnt_M = self.learnt_M = self.sampled_M
        if weight_M is not None:
            learnt_M = self.learnt_M = self.sampled_M | (weight_M > 0)
        self.sessions = found.rows
        lengths = batch.response_ids.lengths
        session_M = per_token(self.sessions, lengths)
        weigh = partial(
            token_weights,
            objective.algorithm.aggregation,
            sessions=len(found.tokens_S),
            dtype=dtype,
            whole_S=found.whole_S,
            tokens_S=found.tokens_S,
        )
        columns = objective.columns(batch)
        weights_M = weigh(learnt_M, session_M)
        columns["weights"] = weights_M = weights_M if weight_M is None else weights_M * weight_M.to(dtype)
        self.columns = {name: x.to(dtype) if x.is_floating_point() else x for name, x in columns.items()}
        self.columns["session"] = session_M
        if bool((learnt_M & ~self.sampled_M).any()):
            self.columns["sampled"] = self.sampled_M
        if batch.groups is not None:
            self.columns["group"] = per_token(batch.groups, lengths)
        self.trace = None
        if batch.recorded is not None and any(batch.recorded):
            self.trace = UpdateTrace(batch.recorded, lengths)
            self.columns["recorded"] = self.trace.recorded_M
        if objective.teaching is not None and batch.teachers is not None:
            teacher_M = self.columns["teacher"] = per_token(batch.teachers.teacher, lengths)
            shares, here_M = objective.teaching.shares, self.sampled_M
            multiplied = batch.teachers.factors
            if (shares is not None or multiplied) and self.tokens:
                weights, teachers = weights_M[here_M], teacher_M[here_M]
                if whole is not None:  # the summed weights of each row's tokens, whichever rank has it
                    weight_B = torch.tensor(whole.weights)
                    weights = weigh(weight_B > 0, found.session_B).double() * weight_B
                    teachers = torch.tensor(whole.teachers)
                if multiplied:
                    shares = multiplied_shares(weights, teachers, multiplied)
                assert shares is not None
                factors = share_factors(weights, teachers, shares)
                weights_M[here_M] *= factors[teacher_M[here_M]].to(weights_M.dtype)
        self.whole_sessions = loss_traits(objective.algorithm.loss).whole_sessions and objective.has_policy

        active_S = torch.ones(len(found.tokens_S), dtype=torch.bool)
        if objective.zero_without_advantage:
            active_S = torch.zeros_like(active_S)
            pulled_M = self.sampled_M & (self.columns["advantages"] != 0)
            active_S[session_M[pulled_M | (learnt_M & ~self.sampled_M)]] = True
            if parallel is not None:
                active_S = torch.stack(parallel.gather(active_S)).any(0)
        self.active = [i for i, session in enumerate(self.sessions) if active_S[session]]
        self.idle = [i for i, session in enumerate(self.sessions) if not active_S[session]]
        self.idle_tokens = int((self.sampled_M & ~active_S[session_M]).sum())

    def microbatches(self, trunk: PackedModel, rows: list[int]) -> Iterator[Packed]:
        """Yield micro-batches of these rows, to predict the tokens that are trained on."""
        sessions = self.sessions if self.whole_sessions else None
        return trunk.microbatches(self.rows, only=rows, sampled_M=self.learnt_M, sessions=sessions)

    def columns_of(self, packed: Packed) -> dict[str, Tensor]:
        device = packed.ids_N.device
        return {name: x_M[packed.column_M].to(device) for name, x_M in self.columns.items()}
