"""Divergences from the teacher's whole distribution, or from its top-k and the mass of all other tokens.

Values and gradients are computed together, a few rows at a time, so that beside the logits that come in
nothing of their size is held but the gradient. With `pull` = p d(divergence)/dp of each bucket:

    full   d/dz = pull - p sum(pull)
    top-k  d/dz = pull_k - p_k sum(pull)                       at the teacher's tokens
           d/dz = (p / p_tail) (pull_tail - p_tail sum(pull))  at all others

The top-k and one bucket for the rest (the tail) are a coarser view of the same two distributions: the
divergence is at least 0, 0 only where they agree on all buckets, and never above that of the full vocabulary.

The student's tail is the log-sum-exp of its other logits: value and gradient keep their digits however small
it is. Of the teacher only the top-k is known. Its tail is 1 minus their mass, known up to rounding: of the
tails within this margin, the one nearest to the student's is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from practicum.algorithms.distill.registry import Compare, distribution_divergence
from practicum.algorithms.distill.types import Buckets, DistillTerms
from practicum.algorithms.token_logprobs import log_distribution, logprobs_at, row_blocks


def full_divergence(
    kind: str, logits_CV: Tensor, teacher_logits_CV: Tensor, *, beta: float = 0.5, clamp: float | None = None
) -> DistillTerms:
    """Divergence over the whole vocabulary; of a token above `clamp`, the value is `clamp`.

    Logits come divided by the temperature, and finite.
    """
    compare = distribution_divergence(kind)
    needs_grad = logits_CV.requires_grad and torch.is_grad_enabled()
    return DistillTerms(*_Full.apply(logits_CV, teacher_logits_CV, compare, beta, clamp, needs_grad))


def topk_divergence(
    kind: str,
    logits_CV: Tensor,
    teacher_ids_CK: Tensor,
    teacher_logprobs_CK: Tensor,
    *,
    beta: float = 0.5,
    clamp: float | None = None,
) -> DistillTerms:
    """Divergence over the teacher's top-k (distinct ids) and the tail; `clamp` as in `full_divergence`.

    Logprobs are normalised over the whole vocabulary, at the temperature that the logits were divided by.
    """
    compare = distribution_divergence(kind)
    needs_grad = logits_CV.requires_grad and torch.is_grad_enabled()
    return DistillTerms(
        *_TopK.apply(logits_CV, teacher_ids_CK, teacher_logprobs_CK, compare, beta, clamp, needs_grad)
    )


@torch.no_grad()
def topk_overlap(logits_CV: Tensor, teacher_ids_CK: Tensor) -> Tensor:
    """Share [C] of the teacher's top-k that is in the student's own top-k."""
    k = teacher_ids_CK.shape[1]
    least_C1 = logits_CV.topk(k, dim=-1, sorted=True).values[:, -1:]
    return (logits_CV.gather(1, teacher_ids_CK) >= least_C1).to(logits_CV.dtype).mean(-1)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        teacher_logits_CV: Tensor,
        compare: Compare,
        beta: float,
        clamp: float | None,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss_C, gap_C = (logits_CV.new_empty(logits_CV.shape[0]) for _ in range(2))
        grad_CV = torch.empty_like(logits_CV) if needs_grad else None
        for rows in row_blocks(logits_CV):
            log_p, log_q = (log_distribution(x[rows]) for x in (logits_CV, teacher_logits_CV))
            buckets = Buckets(log_p - log_q, log_p.exp(), log_q.exp(), beta)
            gap_C[rows] = _entropy_gap(buckets, log_p, log_q)
            terms = compare(buckets)
            loss_C[rows] = terms.value.sum(-1)
            if grad_CV is not None:
                common_C1 = terms.pull.sum(-1, keepdim=True)
                torch.addcmul(terms.pull, buckets.p, common_C1, value=-1.0, out=grad_CV[rows])
        clamped_C = _clamp(loss_C, clamp)
        if grad_CV is not None:
            ctx.save_for_backward(grad_CV.masked_fill_(clamped_C.unsqueeze(1), 0.0))
        ctx.mark_non_differentiable(clamped_C, gap_C)
        return loss_C, clamped_C, gap_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_CV,) = ctx.saved_tensors
        return grad_CV * grads[0].unsqueeze(1), None, None, None, None, None


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        teacher_ids_CK: Tensor,
        teacher_logprobs_CK: Tensor,
        compare: Compare,
        beta: float,
        clamp: float | None,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_CK = logprobs_at(logits_CV, teacher_ids_CK)
        rest_C1, log_tail_C1 = _student_tail(logits_CV, teacher_ids_CK)
        log_p, log_q = _with_tails(logprobs_CK, log_tail_C1, teacher_logprobs_CK)
        buckets = Buckets(log_p - log_q, log_p.exp(), log_q.exp(), beta)
        gap_C = _entropy_gap(buckets, log_p, log_q).to(logits_CV.dtype)
        terms = compare(buckets)
        loss_C = terms.value.sum(-1)
        clamped_C = _clamp(loss_C, clamp)
        if needs_grad:
            # Masses that sum to a little more or less than 1 still give slopes that sum to 0.
            mass_C1, common_C1 = (x.sum(-1, keepdim=True) for x in (buckets.p, terms.pull))
            slope = terms.pull * mass_C1 - buckets.p * common_C1
            slope.masked_fill_(clamped_C.unsqueeze(1), 0.0)
            ctx.save_for_backward(logits_CV, teacher_ids_CK, rest_C1, slope)
        ctx.mark_non_differentiable(clamped_C, gap_C)
        return loss_C.to(logits_CV.dtype), clamped_C, gap_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits_CV, ids_CK, rest_C1, slope = ctx.saved_tensors
        slope = (slope * grads[0].unsqueeze(1)).to(logits_CV.dtype)
        # The softmax of the other tokens; what it gives at the teacher's is overwritten.
        grad_CV = (logits_CV - rest_C1).exp_().mul_(slope[:, -1:])
        return grad_CV.scatter_(1, ids_CK, slope[:, :-1]), None, None, None, None, None, None


def _entropy_gap(buckets: Buckets, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The student's entropy minus the teacher's [C], over these buckets."""
    return (buckets.q * log_q).sum(-1) - (buckets.p * log_p).sum(-1)


def _clamp(loss_C: Tensor, clamp: float | None) -> Tensor:
    """Clamps the losses in place, and tells where (bool)."""
    if clamp is None:
        return torch.zeros_like(loss_C, dtype=torch.bool)
    clamped_C = loss_C > clamp
    loss_C.clamp_(max=clamp)
    return clamped_C


def _student_tail(logits_CV: Tensor, ids_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits of all other tokens [C, 1], and the log of their mass (float64).

    Both are minus infinity if there are no others.
    """
    rest_C1 = logits_CV.new_empty(len(logits_CV), 1)
    log_tail_C1 = logits_CV.new_empty(len(logits_CV), 1, dtype=torch.float64)
    for rows in row_blocks(logits_CV):
        others = logits_CV[rows].scatter(1, ids_CK[rows], -torch.inf)
        rest_C1[rows] = others.logsumexp(-1, keepdim=True)
        best = logits_CV[rows].gather(1, ids_CK[rows]).double().logsumexp(-1, keepdim=True)
        rest = rest_C1[rows].double()
        log_tail_C1[rows] = rest - torch.logaddexp(best, rest)
    return rest_C1, log_tail_C1


def _with_tails(logprobs_CK: Tensor, log_tail_C1: Tensor, teacher_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs [C, K + 1] of student and teacher in float64, with the tail's as the last.

    Logprobs of one row have the error of their normaliser in common. The student's is known, as its buckets
    should sum to 1. It is taken from the teacher's as well, which came to be in the same way, so that equal
    models have equal tails.
    """
    # Without other tokens both have no tail; a finite number stands for it, as log-ratios are finite.
    log_p = torch.cat([logprobs_CK.double(), log_tail_C1.clamp_min(-1e4)], dim=-1)
    error_C1 = log_p.logsumexp(-1, keepdim=True)
    log_p, teacher64_CK = log_p - error_C1, teacher_CK.double() - error_C1
    log_tail_C1, rest_C1 = log_p[:, -1:], _one_minus(teacher64_CK)
    tail_C1 = log_tail_C1.exp()
    off_C1 = (_one_minus(log_p[:, :-1]) - tail_C1).abs()
    margin_C1 = off_C1.clamp_min(torch.finfo(teacher_CK.dtype).eps)
    low_C1, high_C1 = rest_C1 - margin_C1, rest_C1.clamp_min(0.0) + margin_C1
    other_C1 = torch.where(tail_C1 < low_C1, low_C1, high_C1)
    within_C1 = (tail_C1 >= low_C1) & (tail_C1 <= high_C1)
    log_rest_C1 = torch.where(within_C1, log_tail_C1, other_C1.log())
    return log_p, torch.cat([teacher64_CK, log_rest_C1], dim=-1)


def _one_minus(logprobs_CK: Tensor) -> Tensor:
    """The mass [C, 1] that these tokens leave, in float64; below 0 where rounding gave them too much."""
    return -torch.expm1(logprobs_CK.double().logsumexp(-1, keepdim=True))
