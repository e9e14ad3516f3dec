"""What the student's update takes from its teachers: the divergence of each sampled token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algorithms.distill.distributions import full_divergence, topk_divergence, topk_overlap
from practicum.algorithms.distill.sampled import sampled_divergence
from practicum.algorithms.distill.types import DistillTerms
from practicum.algorithms.token_logprobs import log_distribution, logprobs_at, scaled_logits
from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning.logprobs import Reduce, TokenLogprobs
from practicum.learning.update_metrics import TokenMeans
from practicum.recipe.schema.teacher_sections import Distill

Head = Callable[[Tensor], Tensor]
"""From a teacher's last hidden states [M, H] to its logits [M, V]."""


@dataclass(frozen=True, slots=True)
class TeacherColumns:
    """What teachers said of each response token. `teacher` numbers the teacher of each row."""

    teacher: Sequence[int]
    logprobs: Ragged
    topk_ids: Ragged | None = None
    topk_logprobs: Ragged | None = None
    hidden: Ragged | None = None


@dataclass(frozen=True, slots=True)
class DistillResult:
    """Per sampled token [M]: the divergence to add to the loss, if it enters there."""

    loss_M: Tensor | None
    kl_M: Tensor
    """k1 of each token to its teacher, without gradient."""
    overlap_M: Tensor | None
    """Share of the teacher's top-k in the student's own, where the signal tells."""
    entropy_gap_M: Tensor | None
    """The student's entropy minus the teacher's, where the signal tells."""
    clamped_M: Tensor | None = None
    """Where distill.clamp held the divergence, if there is a clamp."""
    top: tuple[Tensor, ...] = ()
    """The teacher's top-k and their logprobs of recorded tokens, if the learner alone knows them."""


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """How teachers enter the update.

    `heads` are the output heads by the teacher's number, for the signal `full`. `alone`: nothing but the
    teachers is learnt from. `shares` are target shares of the loss by the teacher's number.
    """

    distill: Distill
    temperature: float
    heads: Sequence[Head] = ()
    alone: bool = False
    shares: Mapping[int, float] | None = None

    @property
    def by_loss(self) -> bool:
        """Whether the divergence is back-propagated."""
        return self.distill.through == "loss"

    def columns(self, given: TeacherColumns | None, lengths: list[int]) -> dict[str, Tensor]:
        """The token columns [M, ...] that this way of teaching reads, of responses of these lengths."""
        if given is None:
            raise DataError("the mini-batch is missing what the teachers said, which distill needs")
        wanted = {"teacher_logprobs": given.logprobs}
        if self.by_loss:
            wanted |= {
                "sampled": {},
                "top_k": {"teacher_topk_ids": given.topk_ids, "teacher_topk_logprobs": given.topk_logprobs},
                "full": {"teacher_hidden": given.hidden},
            }[self.distill.signal]
        missing = [name for name, column in wanted.items() if column is None]
        if missing:
            raise DataError(f"the mini-batch is missing {', '.join(missing)}, which distill needs")
        uneven = [name for name, column in wanted.items() if column is not None and column.lengths != lengths]
        if uneven:
            raise DataError(f"{', '.join(uneven)} has rows of other lengths than the responses")
        return {name: column.values for name, column in wanted.items() if column is not None}

    def reduce(
        self, columns: Mapping[str, Tensor], target_M: Tensor, sampling_temperature: float
    ) -> Reduce | None:
        """What to compute from each chunk of the student's logits; None if its logprobs are enough."""
        other = self.temperature != sampling_temperature
        if self.by_loss and self.distill.signal != "sampled":
            return lambda logits_CV, rows: self._distributions(logits_CV, rows, columns, target_M)
        if other:
            return lambda logits_CV, rows: (self._logprobs(logits_CV, target_M[rows]),)
        return None

    def token_losses(
        self, found: TokenLogprobs, columns: Mapping[str, Tensor], means: TokenMeans
    ) -> DistillResult:
        """What the teachers say of sampled tokens; statistics go into `means`."""
        teacher_M = columns["teacher_logprobs"]
        overlap_M = gap_M = terms = clamped_M = None
        top: list[Tensor] = []
        if self.by_loss and self.distill.signal != "sampled":
            divergence_M, held_M, gap_M, overlap_M, compared_M, *top = found.more
            terms = DistillTerms(divergence_M, held_M)
            means.add("teacher_overlap", overlap_M)
            means.add("teacher_entropy_gap", gap_M)
        else:
            compared_M = found.more[0] if found.more else found.logprobs_M
        if self.by_loss and self.distill.signal == "sampled":
            kind, clamp = self.distill.divergence, self.distill.clamp
            terms = sampled_divergence(kind, compared_M, teacher_M, clamp=clamp)
        if terms is not None:
            means.add("distill_loss", terms.loss_N)
            if self.distill.clamp is not None:
                clamped_M = terms.clamped_N
                means.add("distill_clamped", clamped_M)
        kl_M = (compared_M - teacher_M).detach()
        means.add("teacher_kl", kl_M)
        loss_M = None if terms is None else terms.loss_N
        return DistillResult(loss_M, kl_M, overlap_M, gap_M, clamped_M, tuple(top))

    def _distributions(
        self, logits_CV: Tensor, rows: slice, columns: Mapping[str, Tensor], target_M: Tensor
    ) -> tuple[Tensor, ...]:
        distill = self.distill
        options = {"beta": distill.beta, "clamp": distill.clamp}
        scaled_CV = scaled_logits(logits_CV, self.temperature)
        top: tuple[Tensor, ...] = ()
        if distill.signal == "top_k":
            ids_CK = columns["teacher_topk_ids"][rows]
            best_CK = columns["teacher_topk_logprobs"][rows]
            terms = topk_divergence(distill.divergence, scaled_CV, ids_CK, best_CK, **options)
        else:
            hidden_CH = columns["teacher_hidden"][rows]
            own_CV = self._teacher_logits(hidden_CH, columns["teacher"][rows])
            teacher_CV = scaled_logits(own_CV, self.temperature)
            ids_CK = teacher_CV.topk(min(distill.top_k, teacher_CV.shape[1])).indices
            terms = full_divergence(distill.divergence, scaled_CV, teacher_CV.to(scaled_CV.dtype), **options)
            if "recorded" in columns:
                top = _top_logprobs(teacher_CV, ids_CK, columns["recorded"][rows])
        overlap_C = topk_overlap(scaled_CV, ids_CK)
        compared_C = logprobs_at(scaled_CV, target_M[rows].unsqueeze(1)).squeeze(1)
        assert terms.entropy_gap_N is not None
        return terms.loss_N, terms.clamped_N, terms.entropy_gap_N, overlap_C, compared_C, *top

    def _logprobs(self, logits_CV: Tensor, target_C: Tensor) -> Tensor:
        all_CV = log_distribution(scaled_logits(logits_CV, self.temperature))
        return all_CV.gather(1, target_C.unsqueeze(1)).squeeze(1)

    @torch.no_grad()
    def _teacher_logits(self, hidden_CH: Tensor, teacher_C: Tensor) -> Tensor:
        """Each token's logits by the head of its teacher."""
        with torch.autocast(hidden_CH.device.type, enabled=False):  # a teacher's numbers are its own
            return self._by_heads(hidden_CH, teacher_C)

    def _by_heads(self, hidden_CH: Tensor, teacher_C: Tensor) -> Tensor:
        present = teacher_C.unique().tolist()
        if len(present) == 1:
            return self.heads[present[0]](hidden_CH)
        parts, order = [], []
        for number in present:
            mine = (teacher_C == number).nonzero().squeeze(1)
            parts.append(self.heads[number](hidden_CH[mine]))
            order.append(mine)
        return torch.cat(parts)[torch.cat(order).argsort()]


@torch.no_grad()
def _top_logprobs(logits_CV: Tensor, ids_CK: Tensor, chosen_C: Tensor) -> tuple[Tensor, Tensor]:
    """These most likely tokens of the chosen ones, with their logprobs."""
    ids_MK = ids_CK[chosen_C]
    return ids_MK, log_distribution(logits_CV[chosen_C]).gather(1, ids_MK)


def share_factors(weights_N: Tensor, teacher_N: Tensor, shares: Mapping[int, float]) -> Tensor:
    """Factors by the teacher's number that give each its share of the weights and leave their sum as it is.

    Shares of teachers that have no weight go to the others, in proportion.
    """
    sums = torch.zeros(int(teacher_N.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, teacher_N, weights_N.double())
    present = [number for number in shares if number < len(sums) and sums[number] > 0]
    whole = sum(shares[number] for number in present)
    factors = torch.ones_like(sums)
    for number in present:
        factors[number] = shares[number] / whole * sums.sum() / sums[number]
    return factors.to(weights_N.dtype)
