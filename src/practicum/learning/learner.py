"""The student as it learns: its model, its optimizer, and one update from one mini-batch."""

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
from practicum.learning.distill_loss import DistillSettings, share_factors
from practicum.learning.learner_checkpoint import TrainedModel
from practicum.learning.logprobs import LogprobScorer, token_logprobs
from practicum.learning.objective import Objective, token_losses
from practicum.learning.optimizer import Metrics, lr_at, stop_on_nonfinite
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import Packed, RowSpans
from practicum.learning.parallel import Parallel, whole, whole_tensors
from practicum.learning.update_batch import (
    BatchFacts,
    UpdateBatch,
    need_column,
    per_token,
    sessions_of,
)
from practicum.learning.update_metrics import RouterLoad, TeacherSums, TokenMeans
from practicum.learning.update_trace import TOP, UpdateTrace
from practicum.models.adapter_files import write_adapter
from practicum.models.export_model import save_description, write_model
from practicum.models.fingerprint import LENGTH
from practicum.models.lora import base_fingerprint, merged_weights, trained_names
from practicum.models.weight_files import WeightFiles
from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.derived import EXPORTED
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train


class Learner(TrainedModel):
    """The student. `scorer` gives its logprobs without gradient.

    `temperature` is that of the rollouts; supervised training is at temperature 1. `by_group` holds sums of
    the last update by the batch's groups, `trace` what it did to the tokens of recorded rows, `weight` the
    summed weights of the tokens in its loss.

    On several ranks (`parallel`) each has a shard of the weights and its rows of each mini-batch. Every
    method is then called on all ranks at once, and all get the same metrics.
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
        files: WeightFiles | None = None,
    ) -> None:
        """`files` are those of a model without weights, of which each rank reads its shard."""
        self.model = model
        self.objective = Objective(algorithm, teaching)
        self.by_group, self.weight = TeacherSums(), 0.0
        self.trace: UpdateTrace | None = None
        self.temperature = 1.0 if algorithm.loss == "supervised" else temperature
        self._trained_names = trained_names(model)
        self.trunk = PackedModel(model, train, parallel, files=files)
        if self._trained_names is not None:
            self.base = base_fingerprint(model, whole)
        self.scorer = LogprobScorer(self.trunk)
        super().__init__(model, train, parallel, on_nonfinite)

    def update(self, batch: UpdateBatch) -> Metrics:
        """One optimizer step on one mini-batch; metrics as in `update_metrics.METRICS`.

        The result does not depend on how rows fall into micro-batches. Without a sampled token nothing is
        done; with a non-finite loss or gradient the weights stay as they are.
        """
        halved = self.trunk.halved
        job, report = self.trunk.halving(partial(self._accumulate, batch))
        if not job.tokens:
            return {"tokens": 0.0}
        self.stepper.zero_missing_grads()
        report = self.join(report)
        self.by_group, self.weight = report.groups, report.weight
        if job.trace is not None:
            job.trace.total = report.absolute
        report.count_halved(self.trunk.halved - halved)
        return self.apply(report, lr_at(self.step, self.train))

    def _accumulate(self, batch: UpdateBatch) -> tuple[_Update, _Report]:
        """Gradients of a mini-batch, and what was measured on the way."""
        self.stepper.optimizer.zero_grad(set_to_none=True)
        job = _Update(batch, self.objective, self.trunk.dtype, self.parallel)
        report = _Report(idle_tokens=job.idle_tokens, load=self.trunk.router_load())
        self.by_group, self.trace = report.groups, job.trace
        if job.tokens:
            add = partial(self._add, report, job, trace=job.trace)
            with self.trunk.training():
                self.trunk.each(job.microbatches(self.trunk, job.active), add)
            with torch.no_grad():
                self.trunk.each(job.microbatches(self.trunk, job.idle), add)
        return job, report

    def gradient_norms(self, batch: UpdateBatch, parts: Sequence[Sequence[int]]) -> list[float]:
        """Norm of the gradient of each part of the rows in this mini-batch's loss; nothing is learnt."""
        job = _Update(batch, self.objective, self.trunk.dtype, self.parallel)
        norms = []
        for rows in parts:
            mine = sorted(set(rows) & set(job.active))
            self.trunk.halving(partial(self._accumulate_part, job, mine))
            norms.append(self.stepper.take_norm())
        return norms

    def _accumulate_part(self, job: _Update, rows: list[int]) -> None:
        self.stepper.optimizer.zero_grad(set_to_none=True)
        with self.trunk.training():
            self.trunk.each(job.microbatches(self.trunk, rows), partial(self._add, _Report(), job))

    def _add(self, report: _Report, job: _Update, packed: Packed, trace: UpdateTrace | None = None) -> Tensor:
        """Forward pass of one micro-batch: its part of the loss."""
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
                logprobs_grad=self.objective.uses_logprobs,
                also=also,
                top=None if trace is None else (columns["recorded"], TOP),
            )
        losses = token_losses(found, columns, columns["session"], self.objective, report.means)
        weighted_M = columns["weights"] * losses.loss_M
        loss = weighted_M.sum()
        report.tokens += len(packed.target_M)
        report.weight += float(columns["weights"].double().sum())
        report.add("loss", float(loss.detach()))
        report.absolute += float(weighted_M.detach().abs().sum())
        if trace is not None:
            trace.add(packed.column_M, losses.numbers | {"loss": weighted_M}, losses.rules)
            trace.add_top(packed.column_M, "student", found.top)
            if losses.taught is not None and losses.taught.top:
                trace.add_top(packed.column_M, "teacher", losses.taught.top)
        if losses.policy_M is not None:
            report.add("policy_loss", float((columns["weights"] * losses.policy_M.detach()).sum()))
        taught = losses.taught
        if taught is not None and taught.loss_M is not None and not _reaches(taught.loss_M):
            raise CheckError("the divergence from the teachers has no gradient: nothing is learnt from them")
        if "group" in columns:
            report.groups.add(
                columns["group"],
                weight=columns["weights"],
                loss=weighted_M,
                entropy=found.entropy_M,
                kl=None if taught is None else taught.kl_M,
                overlap=None if taught is None else taught.overlap_M,
                entropy_gap=None if taught is None else taught.entropy_gap_M,
            )
        return loss

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that training changes themselves, not copies; tied ones once.

        On several ranks each is gathered when its turn comes: all ranks must go through them.
        """
        return whole_tensors(self.model, self._trained_names)

    def plain_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `named_weights`, for a model without adapters: all weights, the adapter merged into them."""
        if self._trained_names is None:
            return self.named_weights()
        return merged_weights(self.model, whole)

    def fingerprint(self, length: int = LENGTH) -> Tensor:
        """Logprobs [length - 1] of a fixed sequence, to compare with the engine's; all ranks together."""
        return self.scorer.fingerprint(length)

    def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model and its tokenizer in HuggingFace format; rank 0 does so.

        An adapter is written in PEFT's format into the folder `adapter`, beside the model it is merged into.
        """
        if self.base is not None:
            self._export_adapted(folder, tokenizer)
            return
        if self.parallel is None:
            self.model.save_pretrained(folder)
        else:
            kept = set(self.model.state_dict())
            buffers = {name: x for name, x in self.model.named_buffers() if name in kept}
            weights = self._on_first_rank(whole_tensors(self.model))  # tied ones once, as in one process
            if self.parallel.rank != 0:
                return
            weights |= buffers
            self.model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)

    def _on_first_rank(self, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The weights in the memory of the first rank's host; the others take part in gathering each."""
        if self.parallel is None:
            return dict(weights)
        return {name: x.cpu() for name, x in weights if self.parallel.rank == 0}

    def _export_adapted(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        weights, adapter = (self._on_first_rank(x) for x in (self.plain_weights(), self.named_weights()))
        if self.parallel is not None and self.parallel.rank != 0:
            return
        assert self.base is not None
        with TemporaryDirectory() as description:
            save_description(Path(description), self.model, tokenizer, None)
            write_model(Path(description), weights, folder)
        write_adapter(folder / EXPORTED, self.model, adapter, self.base)


@dataclass(slots=True)
class _Report:
    """What an update measures, over micro-batches and ranks; `tokens` and `weight` of all in its loss."""

    tokens: int = 0
    idle_tokens: int = 0
    weight: float = 0.0
    totals: dict[str, float] = field(default_factory=lambda: {"loss": 0.0})
    means: TokenMeans = field(default_factory=TokenMeans)
    groups: TeacherSums = field(default_factory=TeacherSums)
    load: RouterLoad | None = None
    absolute: float = 0.0
    """Summed sizes of the tokens' losses."""

    def add(self, name: str, part: float) -> None:
        """Add a micro-batch's part of a sum."""
        self.totals[name] = self.totals.get(name, 0.0) + part

    def count_halved(self, times: int) -> None:
        """Note how often micro-batches were halved, if they were."""
        if times:
            self.add("microbatch_halved", float(times))

    def merge(self, other: _Report) -> None:
        """Add what another rank measured."""
        self.tokens += other.tokens
        self.idle_tokens += other.idle_tokens
        self.absolute += other.absolute
        self.weight += other.weight
        for name, part in other.totals.items():
            self.add(name, part)
        self.means.merge(other.means)
        self.groups.merge(other.groups)
        if self.load is not None and other.load is not None:
            self.load.merge(other.load)

    def result(self) -> Metrics:
        """The metrics."""
        loads = self.load.result() if self.load is not None else {}
        counts = {"tokens": float(self.tokens), "idle_tokens": self.idle_tokens / max(self.tokens, 1)}
        return counts | self.totals | self.means.result() | loads


class _Update:
    """One mini-batch, or this rank's rows of it, with everything known before the first backward pass."""

    def __init__(
        self, batch: UpdateBatch, objective: Objective, dtype: torch.dtype, parallel: Parallel | None
    ) -> None:
        assert (parallel is None) == (batch.whole is None), "a rank's rows come with the whole mini-batch"
        self.rows = RowSpans(batch.prompt_ids, batch.response_ids, batch.extras)
        self.sampled_M = need_column(batch, "response_mask", "every update").bool()
        whole = batch.whole
        self.tokens = int(self.sampled_M.sum()) if whole is None else sum(whole.sampled_tokens)
        found = sessions_of(batch, self.sampled_M)
        self.sessions = found.rows
        lengths = batch.response_ids.lengths
        session_M = per_token(self.sessions, lengths)
        weigh = partial(
            token_weights,
            objective.algorithm.aggregation,
            sessions=len(found),
            dtype=dtype,
            whole_S=found.whole_S,
            tokens_S=found.tokens_S,
        )
        columns = objective.columns(batch)
        columns["weights"] = weigh(self.sampled_M, session_M)
        self.columns = {name: x.to(dtype) if x.is_floating_point() else x for name, x in columns.items()}
        self.columns["session"] = session_M
        if batch.groups is not None:
            self.columns["group"] = per_token(batch.groups, lengths)
        self.trace = None
        if batch.recorded is not None and any(batch.recorded):
            self.trace = UpdateTrace(batch.recorded, lengths)
            self.columns["recorded"] = self.trace.recorded_M
        if objective.teaching is not None and batch.teachers is not None:
            everywhere = None
            if batch.whole is not None:
                everywhere = _row_weights(batch.whole, found.session_B, weigh)
            self._teach(objective.teaching, per_token(batch.teachers.teacher, lengths), everywhere)
        self.whole_sessions = loss_traits(objective.algorithm.loss).whole_sessions and objective.has_policy

        active_S = torch.ones(len(found), dtype=torch.bool)
        if objective.zero_without_advantage:
            active_S = torch.zeros(len(found), dtype=torch.bool)
            active_S[session_M[self.sampled_M & (self.columns["advantages"] != 0)]] = True
            if parallel is not None:
                active_S = torch.stack(parallel.gather(active_S)).any(0)
        self.active = [i for i, session in enumerate(self.sessions) if active_S[session]]
        self.idle = [i for i, session in enumerate(self.sessions) if not active_S[session]]
        self.idle_tokens = int((self.sampled_M & ~active_S[session_M]).sum())

    def _teach(
        self, teaching: DistillSettings, teacher_M: Tensor, everywhere: tuple[Tensor, Tensor] | None
    ) -> None:
        """`everywhere` are weights and teachers of all rows of the mini-batch, if some are not here."""
        self.columns["teacher"] = teacher_M
        if teaching.shares is None or not self.tokens:
            return
        weights_M, here_M = self.columns["weights"], self.sampled_M
        weights, teachers = everywhere or (weights_M[here_M], teacher_M[here_M])
        factors = share_factors(weights, teachers, teaching.shares)
        weights_M[here_M] *= factors[teacher_M[here_M]].to(weights_M.dtype)

    def microbatches(self, trunk: PackedModel, rows: list[int]) -> Iterator[Packed]:
        """Micro-batches of these rows, to predict their sampled tokens."""
        sessions = self.sessions if self.whole_sessions else None
        return trunk.microbatches(self.rows, only=rows, sampled_M=self.sampled_M, sessions=sessions)

    def columns_of(self, packed: Packed) -> dict[str, Tensor]:
        """The columns of the micro-batch's sampled tokens, on its device."""
        device = packed.ids_N.device
        return {name: x_M[packed.column_M].to(device) for name, x_M in self.columns.items()}


def _reaches(loss_M: Tensor) -> bool:
    """Whether a backward pass from here would reach the weights, if there is to be one."""
    return loss_M.requires_grad or not torch.is_grad_enabled()


def _row_weights(
    whole: BatchFacts, session_B: Tensor, weigh: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The summed weights of each row's tokens, on any rank, and its teacher [B]."""
    assert whole.teachers is not None, "the whole mini-batch is missing its rows' teachers"
    sampled_B = torch.tensor(whole.sampled_tokens)
    weights_B = weigh(sampled_B > 0, session_B).double() * sampled_B
    return weights_B, torch.tensor(whole.teachers)
