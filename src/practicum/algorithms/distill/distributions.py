"""Divergences from the teacher's whole distribution, or from its top-k and the mass of all other tokens.

Values and gradients are computed together, a few rows at a time, so that beside the logits that come in
nothing of their size is held but the gradient. With `pull` = p d(divergence)/dp of each bucket:

    full   d/dz = pull - p sum(pull)
    top-k  g_k = pull_k - p_k pull_tail / p_tail at the teacher's tokens, d/dz = scatter(g) - p sum(g)

The top-k and one bucket for the rest (the tail) are a coarser view of the same two distributions: the
divergence is at least 0, 0 only where they agree on all buckets, and never above that of the full vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from practicum.algorithms.distill.registry import Compare, distribution_divergence
from practicum.algorithms.distill.types import Buckets, DistillTerms

BLOCK_LOGITS, GPU_BLOCK_LOGITS = 2**18, 2**24
"""Logits of the rows worked on at once: few, so that temporaries stay in a processor's cache and the heap
stays small; more on a GPU, where each call has a price.
"""

TAIL_FLOOR = 1e-6
"""Least mass of the tail, of student and teacher alike.

It is 1 minus the mass of the top-k: with float32 logprobs it has an error of about 1e-7, and less than the
floor would be noise. Where the student's tail is at the floor, the tail has no gradient.
"""


def full_divergence(
    kind: str, logits_CV: Tensor, teacher_logits_CV: Tensor, *, beta: float = 0.5, clamp: float | None = None
) -> DistillTerms:
    """Divergence over the whole vocabulary; of a token above `clamp`, the value is `clamp`.

    Logits come divided by the temperature, and finite.
    """
    compare = distribution_divergence(kind)
    wanted = logits_CV.requires_grad and torch.is_grad_enabled()
    return DistillTerms(*_Full.apply(logits_CV, teacher_logits_CV, compare, beta, clamp, wanted))


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
    wanted = logits_CV.requires_grad and torch.is_grad_enabled()
    return DistillTerms(
        *_TopK.apply(logits_CV, teacher_ids_CK, teacher_logprobs_CK, compare, beta, clamp, wanted)
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
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        loss_C = logits_CV.new_empty(logits_CV.shape[0])
        grad_CV = torch.empty_like(logits_CV) if wanted else None
        for rows in _row_blocks(logits_CV):
            log_p, log_q = logits_CV[rows].log_softmax(-1), teacher_logits_CV[rows].log_softmax(-1)
            buckets = Buckets(log_p - log_q, log_p.exp_(), log_q.exp_(), beta)
            terms = compare(buckets)
            loss_C[rows] = terms.value.sum(-1)
            if grad_CV is not None:
                common_C1 = terms.pull.sum(-1, keepdim=True)
                torch.addcmul(terms.pull, buckets.p, common_C1, value=-1.0, out=grad_CV[rows])
        clamped_C = _clamp(loss_C, clamp)
        if grad_CV is not None:
            ctx.save_for_backward(grad_CV.masked_fill_(clamped_C.unsqueeze(1), 0.0))
        ctx.mark_non_differentiable(clamped_C)
        return loss_C, clamped_C

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
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_CK = _logprobs_at(logits_CV, teacher_ids_CK)
        log_p, floored_C1 = _with_tail(logprobs_CK)
        log_q, _ = _with_tail(teacher_logprobs_CK)
        buckets = Buckets(log_p - log_q, log_p.exp(), log_q.exp(), beta)
        terms = compare(buckets)
        loss_C = terms.value.sum(-1)
        clamped_C = _clamp(loss_C, clamp)
        if wanted:
            p_CK, tail_C1 = buckets.p[:, :-1], buckets.p[:, -1:]
            tail_slope_C1 = (terms.pull[:, -1:] / tail_C1).masked_fill(floored_C1, 0.0)
            slope_CK = terms.pull[:, :-1] - p_CK * tail_slope_C1
            ctx.save_for_backward(
                logits_CV, teacher_ids_CK, slope_CK.masked_fill_(clamped_C.unsqueeze(1), 0.0)
            )
        ctx.mark_non_differentiable(clamped_C)
        return loss_C.to(logits_CV.dtype), clamped_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits_CV, ids_CK, slope_CK = ctx.saved_tensors
        slope_CK = slope_CK * grads[0].unsqueeze(1)
        common_C1 = slope_CK.sum(-1, keepdim=True).to(logits_CV.dtype)
        grad_CV = logits_CV.softmax(-1).mul_(-common_C1)
        grad_CV.scatter_add_(1, ids_CK, slope_CK.to(logits_CV.dtype))
        return grad_CV, None, None, None, None, None, None


def _row_blocks(logits_CV: Tensor) -> Iterator[slice]:
    rows, vocab = logits_CV.shape
    logits = BLOCK_LOGITS if logits_CV.device.type == "cpu" else GPU_BLOCK_LOGITS
    size = max(1, logits // vocab)
    return (slice(i, i + size) for i in range(0, rows, size))


def _clamp(loss_C: Tensor, clamp: float | None) -> Tensor:
    """Clamps the losses in place, and tells where (bool)."""
    if clamp is None:
        return torch.zeros_like(loss_C, dtype=torch.bool)
    clamped_C = loss_C > clamp
    loss_C.clamp_(max=clamp)
    return clamped_C


def _logprobs_at(logits_CV: Tensor, ids_CK: Tensor) -> Tensor:
    """Logprobs of the tokens, by the same steps as a teacher's scores: equal models give equal bits."""
    logprobs_CK = logits_CV.gather(1, ids_CK)
    for rows in _row_blocks(logits_CV):
        logprobs_CK[rows] -= logits_CV[rows].logsumexp(-1, keepdim=True)
    return logprobs_CK


def _with_tail(logprobs_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 logprobs [C, K + 1] with the tail's as the last, and where the tail is at its floor [C, 1]."""
    logprobs_CK = logprobs_CK.double()
    mass_C1 = -torch.expm1(logprobs_CK.logsumexp(-1, keepdim=True))
    tail_C1 = mass_C1.clamp_min(TAIL_FLOOR).log_()
    return torch.cat([logprobs_CK, tail_C1], dim=-1), mass_C1 < TAIL_FLOOR
