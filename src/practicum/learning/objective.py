"""The student's loss of each sampled token, and its statistics.

loss = policy loss (or supervised) + distill.weight × divergence from the teachers - entropy + KL penalty
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algorithms.divergences import (
    SampledTokens,
    full_divergence,
    sampled_divergence,
    shared_divergence,
    topk_divergence,
    topk_mass,
    topk_overlap,
)
from practicum.algorithms.kl import k3, token_kl
from practicum.algorithms.losses import POLICY_LOSSES, PolicyInputs
from practicum.algorithms.token_logprobs import log_distribution, logprobs_at, scaled_logits
from practicum.dataplane.fields import NO_MATCH, NUMERAL, SAME_TOKENS
from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning.logprobs import Reduce, TokenLogprobs
from practicum.learning.update_batch import (
    TeacherColumns,
    TokenMeans,
    UpdateBatch,
    need_column,
    token_column,
)
from practicum.recipe.algorithm_traits import ON_TOP_K
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.teacher_sections import Distill

Columns = Mapping[str, Tensor]
Head = Callable[[Tensor], Tensor]
"""From a teacher's last hidden states [M, H] to its logits [M, V]."""


@dataclass(frozen=True, slots=True)
class DistillResult:
    """Per sampled token [M]: the divergence to add to the loss, if it enters there."""

    loss_M: Tensor | None
    kl_M: Tensor
    """k1 of each token to its teacher, without gradient."""
    overlap_M: Tensor | None
    """Share of the teacher's top-k in the student's own, for signals that have it."""
    entropy_gap_M: Tensor | None
    """The student's entropy minus the teacher's, or None if sampled tokens are compared."""
    known_M: Tensor | None = None
    """With the signal `shared`, True where the teacher is compared."""
    mass_M: Tensor | None = None
    """The teacher's mass on the compared tokens there, if distributions are compared."""
    top: tuple[Tensor, ...] = ()
    """The teacher's top-k and their logprobs of recorded tokens, with the signal `full`."""


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """The teachers' part of the update.

    `heads` are the output heads by the teacher's number, for the signal `full`. `alone` is True if the loss
    has no other term. `shares` are target shares of the loss by the teacher's number. With
    `project`, measured steps make the loss of no group of rows worse, to first order.
    """

    distill: Distill
    temperature: float
    heads: Sequence[Head] = ()
    alone: bool = False
    shares: Mapping[int, float] | None = None
    project: bool = False

    @property
    def by_loss(self) -> bool:
        """True if the divergence is back-propagated."""
        return self.distill.apply_as == "loss"

    @property
    def compares_distributions(self) -> bool:
        return self.by_loss and (self.distill.compares_top or self.distill.signal == "full")

    def columns(self, teachers: TeacherColumns | None, lengths: list[int]) -> dict[str, Tensor]:
        """Return the token columns [M, ...] that the signal needs, of responses of these lengths."""
        if teachers is None:
            raise DataError("the mini-batch is missing teacher_logprobs, which distill needs")
        needed: dict[str, Ragged | None] = {"teacher_logprobs": teachers.logprobs}
        if self.by_loss and self.distill.compares_top:
            needed |= {"teacher_topk_ids": teachers.topk_ids, "teacher_topk_logprobs": teachers.topk_logprobs}
        elif self.by_loss and self.distill.signal == "full":
            needed["teacher_hidden"] = teachers.hidden
        if self.distill.signal == "shared":
            needed["teacher_match"] = teachers.match
        if self.by_loss and teachers.weight is not None:
            needed["teacher_weight"] = teachers.weight
        columns = {}
        for name, column in needed.items():
            if column is None or column.lengths != lengths:
                wrong = "is missing" if column is None else "and response_ids have rows of different lengths"
                raise DataError(f"{name} {wrong} in the mini-batch: distill needs it")
            columns[name] = column.values
        return columns

    def reduce(self, columns: Columns, target_M: Tensor, sampling_temperature: float) -> Reduce | None:
        """Return the function to apply to the student's logits, or None if its logprobs are enough."""
        if self.compares_distributions:
            return lambda logits_CV, rows: self._distributions(logits_CV, rows, columns, target_M)
        if self.temperature != sampling_temperature:
            return lambda logits_CV, rows: (self._logprobs(logits_CV, target_M[rows]),)
        return None

    def token_losses(self, found: TokenLogprobs, columns: Columns, means: TokenMeans) -> DistillResult:
        """Return the divergence of sampled tokens. Statistics go into `means`."""
        teacher_M = columns["teacher_logprobs"]
        loss_M = overlap_M = gap_M = None
        top: list[Tensor] = []
        if self.compares_distributions:
            loss_M, gap_M, common_M, compared_M, *top = found.more
            means.add("teacher_mass" if self.distill.of_student else "teacher_overlap", common_M)
            means.add("teacher_entropy_gap", gap_M)
            overlap_M = None if self.distill.of_student else common_M
        else:
            compared_M = found.more[0] if found.more else found.logprobs_M
            if self.by_loss:
                loss_M = sampled_divergence(self.distill.divergence, compared_M, teacher_M)
        kl_M, known_M, mass_M = (compared_M - teacher_M).detach(), None, None
        if "teacher_match" in columns:
            known_M = columns["teacher_match"] % NUMERAL != NO_MATCH
            means.add("teacher_coverage", known_M)
            means.add("numeral_coverage", known_M[columns["teacher_match"] >= NUMERAL])
            kl_M = kl_M.masked_fill(~known_M, 0.0)
            loss_M = None if loss_M is None else loss_M * known_M
            if "teacher_topk_ids" in columns:
                best_MK, absent_MK = columns["teacher_topk_logprobs"], columns["teacher_topk_ids"] < 0
                mass_M = best_MK.exp().masked_fill(absent_MK, 0.0).sum(-1) * known_M
                means.add("shared_mass", mass_M[known_M])
        if loss_M is not None:
            means.add("distill_loss", loss_M)
        means.add("teacher_kl", kl_M if known_M is None else kl_M[known_M])
        return DistillResult(loss_M, kl_M, overlap_M, gap_M, known_M, mass_M, tuple(top))

    def _distributions(
        self, logits_CV: Tensor, rows: slice, columns: Columns, target_M: Tensor
    ) -> tuple[Tensor, ...]:
        kind, beta = self.distill.divergence, self.distill.beta
        scaled_CV = scaled_logits(logits_CV, self.temperature)
        top: tuple[Tensor, ...] = ()
        if self.distill.signal == "shared":
            loss_C, gap_C, common_C = self._shared(scaled_CV, {name: x[rows] for name, x in columns.items()})
        elif self.distill.signal in ("top_k", "student_top_k"):
            ids_CK = columns["teacher_topk_ids"][rows]
            best_CK = columns["teacher_topk_logprobs"][rows]
            sampled = None
            if kind in ON_TOP_K:  # whole distributions were sampled from, so at temperature 1 both are equal
                sampler_M = columns["rollout_logprobs" if "rollout_logprobs" in columns else "plain_logprobs"]
                sampled = SampledTokens(target_M[rows], columns["teacher_logprobs"][rows], sampler_M[rows])
            loss_C, gap_C = topk_divergence(kind, scaled_CV, ids_CK, best_CK, beta=beta, sampled=sampled)
            common = topk_mass if self.distill.of_student else topk_overlap
            common_C = common(scaled_CV, ids_CK)
        else:
            own_CV = self._teacher_logits(columns["teacher_hidden"][rows], columns["teacher"][rows])
            teacher_CV = scaled_logits(own_CV, self.temperature)
            ids_CK = teacher_CV.topk(min(self.distill.top_k, teacher_CV.shape[1])).indices
            loss_C, gap_C = full_divergence(kind, scaled_CV, teacher_CV.to(scaled_CV.dtype), beta=beta)
            common_C = topk_overlap(scaled_CV, ids_CK)
            if "recorded" in columns:
                recorded_C = columns["recorded"][rows]
                ids_MK = ids_CK[recorded_C]
                top = ids_MK, log_distribution(teacher_CV[recorded_C]).gather(1, ids_MK)
        compared_C = logprobs_at(scaled_CV, target_M[rows].unsqueeze(1)).squeeze(1)
        return loss_C, gap_C, common_C, compared_C, *top

    def _shared(self, scaled_CV: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Return divergence, entropy gap and compared mass of tokens, by the tokenizers of their teachers."""
        kind, beta = self.distill.divergence, self.distill.beta
        ids_CK, best_CK = columns["teacher_topk_ids"], columns["teacher_topk_logprobs"]
        same_C = columns["teacher_match"] == SAME_TOKENS
        parts: list[tuple[Tensor, ...]] = []
        for mine_C, divergence in ((same_C, topk_divergence), (~same_C, shared_divergence)):
            if bool(mine_C.any()):  # all of them without a copy, as the signal top_k does
                whole = bool(mine_C.all())
                logits, ids, best = (x if whole else x[mine_C] for x in (scaled_CV, ids_CK, best_CK))
                parts.append((*divergence(kind, logits, ids, best, beta=beta), topk_mass(logits, ids)))
        if len(parts) == 1:
            loss_C, gap_C, mass_C = parts[0]
            return loss_C, gap_C, mass_C
        order = torch.cat([same_C.nonzero(), (~same_C).nonzero()]).squeeze(1).argsort()
        loss_C, gap_C, mass_C = (torch.cat(column)[order] for column in zip(*parts, strict=True))
        return loss_C, gap_C, mass_C

    def _logprobs(self, logits_CV: Tensor, target_C: Tensor) -> Tensor:
        all_CV = log_distribution(scaled_logits(logits_CV, self.temperature))
        return all_CV.gather(1, target_C.unsqueeze(1)).squeeze(1)

    @torch.no_grad()
    def _teacher_logits(self, hidden_CH: Tensor, teacher_C: Tensor) -> Tensor:
        """Return each token's logits by the head of its teacher, outside of the student's autocast."""
        with torch.autocast(hidden_CH.device.type, enabled=False):
            present = teacher_C.unique().tolist()
            if len(present) == 1:
                return self.heads[present[0]](hidden_CH)
            places = [(teacher_C == number).nonzero().squeeze(1) for number in present]
            pairs = zip(present, places, strict=True)
            logits = torch.cat([self.heads[number](hidden_CH[mine]) for number, mine in pairs])
            return logits[torch.cat(places).argsort()]


def share_factors(weights_N: Tensor, teacher_N: Tensor, shares: Mapping[int, float]) -> Tensor:
    """Return factors by teacher that make the weights' shares these and keep their sum. Shares of teachers
    that have no weight go to the others, in proportion."""
    sums = torch.zeros(int(teacher_N.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, teacher_N, weights_N.double())
    present = [number for number in shares if number < len(sums) and sums[number] > 0]
    whole = sum(shares[number] for number in present)
    factors = torch.ones_like(sums)
    for number in present:
        factors[number] = shares[number] / whole * sums.sum() / sums[number]
    return factors.to(weights_N.dtype)


def multiplied_shares(weights_N: Tensor, teacher_N: Tensor, factors: Mapping[int, float]) -> dict[int, float]:
    """Return the sum of each teacher's weights times its factor, in the way of `share_factors`' shares."""
    sums = torch.zeros(int(teacher_N.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, teacher_N, weights_N.double())
    return {number: factors.get(number, 1.0) * weight for number, weight in enumerate(sums.tolist())}


@dataclass(frozen=True, slots=True)
class Objective:
    """The terms of the loss."""

    algorithm: Algorithm
    teaching: DistillSettings | None = None

    @property
    def supervised(self) -> bool:
        return self.algorithm.loss == "supervised"

    @property
    def has_policy(self) -> bool:
        return not self.supervised and not (self.teaching is not None and self.teaching.alone)

    @property
    def uses_logprobs(self) -> bool:
        """True if the gradient flows through the sampled tokens' logprobs at the sampling temperature."""
        teaching = self.teaching
        sampled = teaching is not None and teaching.by_loss and not teaching.compares_distributions
        return self.supervised or self.has_policy or sampled or self.algorithm.kl.place == "loss"

    @property
    def zero_without_advantage(self) -> bool:
        """True if a session without advantage has no gradient."""
        taught = self.teaching is not None and self.teaching.by_loss
        pulls = self.algorithm.entropy > 0 or self.algorithm.kl.place == "loss" or taught
        return self.has_policy and not pulls

    def columns(self, batch: UpdateBatch) -> dict[str, Tensor]:
        """Return the batch's token columns [M, ...] that this loss reads."""
        compared = ("rollout_logprobs", "plain_logprobs")
        columns: dict[str, Tensor | None] = {name: token_column(batch, name) for name in compared}
        if self.has_policy:
            columns["old_logprobs"] = token_column(batch, "old_logprobs")
            columns["advantages"] = need_column(batch, "advantages", f"loss {self.algorithm.loss}")
        if self.algorithm.kl.place == "loss":
            columns["ref_logprobs"] = need_column(batch, "ref_logprobs", "algorithm.kl.place: loss")
        if self.teaching is not None:
            columns |= self.teaching.columns(batch.teachers, batch.response_ids.lengths)
        return {name: column for name, column in columns.items() if column is not None}


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Loss of each sampled token [M], and the parts of it that are reported. `numbers`, and `rules` with
    where each held, are for the record of single tokens."""

    loss_M: Tensor
    policy_M: Tensor | None
    taught: DistillResult | None
    numbers: dict[str, Tensor | None]
    rules: dict[str, Tensor]


def token_losses(
    found: TokenLogprobs, columns: Columns, session_M: Tensor, objective: Objective, means: TokenMeans
) -> TokenLosses:
    """Return the losses of sampled tokens. Statistics go into `means`. `columns` and `session_M` are of these
    tokens. A session's tokens must all be here (gspo)."""
    algorithm, teaching = objective.algorithm, objective.teaching
    logprobs_M, entropy_M = found.logprobs_M, found.entropy_M
    assert entropy_M is not None
    means.add("entropy", entropy_M)
    every_M = torch.ones_like(logprobs_M, dtype=torch.bool)
    policy_M = taught = None
    numbers: dict[str, Tensor | None] = {"learner_logprobs": logprobs_M, "entropy": entropy_M}
    rules: dict[str, Tensor] = {}
    if objective.supervised:
        policy_M = -logprobs_M
    elif objective.has_policy:
        policy_loss = find_part("policy_loss", algorithm.loss, POLICY_LOSSES)
        policy = policy_loss(
            PolicyInputs(
                logprobs_N=logprobs_M,
                old_logprobs_N=columns.get("old_logprobs", logprobs_M.detach()),
                advantages_N=columns["advantages"],
                mask_N=every_M,
                session_N=session_M,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
        )
        policy_M, stats = policy.loss_N, policy.stats_N
        for name, value_M in stats.items():
            means.add(name, value_M)
        numbers |= {"ratio": stats.get("ratio"), "weight": policy.weight_N}
        rules |= {
            f"clip_{side}": stats[f"clipped_{side}"] for side in ("low", "high") if f"clipped_{side}" in stats
        }
    loss_M = torch.zeros_like(logprobs_M) if policy_M is None else policy_M
    if teaching is not None:
        taught = teaching.token_losses(found, columns, means)
        if taught.loss_M is not None:
            factor = teaching.distill.weight
            factor = factor * columns["teacher_weight"] if "teacher_weight" in columns else factor
            loss_M = loss_M + factor * taught.loss_M
        numbers |= {"teacher_kl": taught.kl_M, "teacher_overlap": taught.overlap_M}
        numbers |= {"teacher_entropy_gap": taught.entropy_gap_M, "teacher_loss": taught.loss_M}
    if algorithm.entropy > 0:
        loss_M = loss_M - algorithm.entropy * entropy_M
    if algorithm.kl.place == "loss":
        kl_M = token_kl(algorithm.kl.estimator, logprobs_M, columns["ref_logprobs"], every_M)
        loss_M = loss_M + algorithm.kl.coefficient * kl_M
        means.add("kl", kl_M)
        numbers["kl"] = kl_M
    if "rollout_logprobs" in columns:
        _add_gap(logprobs_M - columns["rollout_logprobs"], means)
    elif found.plain_M is not None:
        _add_gap(found.plain_M - columns["plain_logprobs"], means)
    return TokenLosses(loss_M, policy_M, taught, numbers, rules)


def _add_gap(difference_M: Tensor, means: TokenMeans) -> None:
    difference_M = difference_M.detach().double()  # k3 of a wildly wrong token overflows in float32
    means.add("gap_mean", difference_M.abs())
    means.add_max("gap_max", difference_M.abs())
    means.add("gap_k3", k3(-difference_M))
    means.add_weights("sample_size", difference_M)
