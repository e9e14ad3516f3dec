"""Divergences of the student from a teacher: of distributions, and of the sampled token's logprob.

Found by their names in the table of traits. The gradient flows only to the student. Of distributions, with p
the student, q the teacher and r = log(p / q):

    forward_kl  KL(q || p) = sum q (expm1(r) - r)        p d/dp = p - q
    reverse_kl  KL(p || q) = sum p (r + expm1(-r))       p d/dp = p r
    jsd         beta KL(q || m) + (1 - beta) KL(p || m)  p d/dp = (1 - beta) p log(p / m)
                m = beta q + (1 - beta) p,  log(p / m) = -log1p(beta expm1(-r))

Of the sampled token's logprob, with d = log student(token) - log teacher(token):

    k1, k2, k3     estimators of the reverse KL, see `practicum.algorithms.kl`
    k1_straight    value of k1, gradient of k2: d times that of log student(token)
    k3_straight    value of k3, gradient of k2
    abs = |d|      mse = d^2

On policy and on average, the gradient of k2 is that of the reverse KL, and the gradient of k3 that of the
forward KL. The gradient of k1 is that of log student(token): it does not depend on the teacher and is 0 on
average, so k1 is for advantages and rewards.

Divergences from the teacher's whole distribution, or from its top-k and the mass of all other tokens, compute
values and gradients together, a few rows at a time, so that beside the logits that come in nothing of their
size is held but the gradient. With `pull` = p d(divergence)/dp of each bucket:

    full   d/dz = pull - p sum(pull)
    top-k  d/dz = pull_k - p_k sum(pull)                       at the teacher's tokens
           d/dz = (p / p_tail) (pull_tail - p_tail sum(pull))  at all others

The top-k and one bucket for the rest (the tail) are a coarser view of the same two distributions: the
divergence is at least 0, 0 only where they agree on all buckets, and never above that of the full vocabulary.

`unbiased_reverse_kl` adds what the tail hides, as the sampled token y shows it. With l = log p - log q of the
tail's masses, and w = p(y) / mu(y) for the policy mu that sampled:

    value + 1[y is in the tail] w (r(y) - l)
    d/dz  + 1[y is in the tail] w (r(y) d log p(y)/dz - l d log p_tail/dz)

Its expectation over y ~ mu is the reverse KL over the full vocabulary, as value and as gradient.

The student's tail is the log-sum-exp of its other logits: value and gradient keep their digits however small
it is. Of the teacher only the top-k is known. Its tail is 1 minus their mass, known up to rounding: of the
tails within this margin, the one nearest to the student's is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from practicum.algorithms.kl import k1, k2, k3
from practicum.algorithms.token_logprobs import log_distribution, logprobs_at, row_blocks
from practicum.recipe.algorithm_traits import ON_DISTRIBUTIONS, ON_SAMPLED, ON_TOP_K
from practicum.recipe.own_parts import find_part

_ABSENT = -1e4
"""A logit without probability, which is finite."""
FAR = 60.0
"""A log-ratio whose exponential is far above all weights, and far below where float32 ends."""


@dataclass(frozen=True)
class Buckets:
    """Two distributions over the same buckets (last dimension): tokens, or a teacher's top-k and its tail.

    `p` is the student, `q` the teacher, `log_ratio` = log p - log q, and `beta` the teacher's weight in jsd's
    mixture. `log_ratio` is finite. `p` and `q` may underflow to 0.
    """

    log_ratio: Tensor
    p: Tensor
    q: Tensor
    beta: float = 0.5


@dataclass(frozen=True)
class BucketTerms:
    """A divergence bucket by bucket: its value (>= 0, with the divergence as sum), and p d(value)/dp.

    Both are exactly 0 where the log-ratio is, and finite where the divergence is.
    """

    value: Tensor
    pull: Tensor


def kl_terms(a: Tensor, b: Tensor, log_ratio: Tensor) -> Tensor:
    """a log(a / b) + b - a of each bucket, with log_ratio = log a - log b: >= 0, and sums to KL(a || b).

    As b and a both sum to 1, b - a adds nothing to the sum; it makes each term >= 0 and cancels an error that
    all log-ratios have in common, such as that of a normaliser.
    """
    # a (d + expm1(-d)) keeps the digits of a small d, but overflows where b is very much greater than a.
    near = a * (log_ratio + torch.expm1(-log_ratio))
    return torch.where(log_ratio > -1.0, near, a * log_ratio + (b - a))


def forward_kl(buckets: Buckets) -> BucketTerms:
    """KL(teacher || student): the student covers all that the teacher would say.

    Hinton et al. 2015, "Distilling the knowledge in a neural network", arXiv:1503.02531.
    """
    value = kl_terms(buckets.q, buckets.p, -buckets.log_ratio)
    return BucketTerms(value, buckets.p - buckets.q)


def reverse_kl(buckets: Buckets) -> BucketTerms:
    """KL(student || teacher): the student keeps to what the teacher finds likely. The usual one on policy.

    Gu et al. 2023, "MiniLLM", arXiv:2306.08543; Agarwal et al. 2023, "On-policy distillation of language
    models", arXiv:2306.13649.
    """
    value = kl_terms(buckets.p, buckets.q, buckets.log_ratio)
    return BucketTerms(value, buckets.p * buckets.log_ratio)


def jsd(buckets: Buckets) -> BucketTerms:
    """Generalised Jensen-Shannon divergence, at most log 2. `beta` is the teacher's weight.

    JSD / beta goes to the forward KL as beta goes to 0, JSD / (1 - beta) to the reverse KL as beta goes to 1;
    JSD itself goes to 0 at both ends. Agarwal et al. 2023, arXiv:2306.13649.
    """
    p, q, r, beta = buckets.p, buckets.q, buckets.log_ratio, buckets.beta
    log_p_m = _log_to_mixture(r, beta, 1.0 - beta)
    log_q_m = _log_to_mixture(-r, 1.0 - beta, beta)
    m = beta * q + (1.0 - beta) * p
    value = beta * kl_terms(q, m, log_q_m) + (1.0 - beta) * kl_terms(p, m, log_p_m)
    return BucketTerms(value, (1.0 - beta) * p * log_p_m)


def _log_to_mixture(log_ratio: Tensor, weight: float, rest: float) -> Tensor:
    """log(a / m) of m = rest a + weight b, with log_ratio = log(a / b): -log(rest + weight exp(-log_ratio)).

    log1p keeps the digits of what is near 0. Where b is next to nothing beside a, the plain sum keeps those
    of a `rest` near 0; where b is FAR greater, `rest` adds nothing.
    """
    apart = -log_ratio
    near = apart.clamp_max(FAR)
    shift = weight * torch.expm1(near)
    log_m = torch.where(shift > -0.5, shift.log1p(), (rest + weight * near.exp()).log())
    return (near - apart) - log_m


def k1_straight(log_ratio_N: Tensor) -> Tensor:
    return _straight(k1, log_ratio_N)


def k3_straight(log_ratio_N: Tensor) -> Tensor:
    return _straight(k3, log_ratio_N)


def _straight(value: Callable[[Tensor], Tensor], log_ratio_N: Tensor) -> Tensor:
    slope_N = k2(log_ratio_N)
    return value(log_ratio_N).detach() + (slope_N - slope_N.detach())


Compare = Callable[[Buckets], BucketTerms]
DISTRIBUTIONS: dict[str, Compare] = {name: globals()[name] for name in ON_DISTRIBUTIONS}
_TORCH = {"abs": torch.abs, "mse": torch.square}
SAMPLED: dict[str, Callable[[Tensor], Tensor]] = {n: _TORCH.get(n) or globals()[n] for n in ON_SAMPLED}


def sampled_divergence(kind: str, logprobs_N: Tensor, teacher_logprobs_N: Tensor) -> Tensor:
    divergence = find_part("sampled_divergence", kind, SAMPLED)
    return divergence(logprobs_N - teacher_logprobs_N.detach())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled token of each position [C], and its logprobs by the teacher and by the policy that sampled.

    The teacher's is at the temperature of the comparison, the sampler's as it was really drawn from.
    """

    ids_C: Tensor
    teacher_C: Tensor
    sampler_C: Tensor


Terms = tuple[Tensor, Tensor]
"""Divergence of each token, and the student's entropy minus the teacher's, without gradient."""


def full_divergence(kind: str, logits_CV: Tensor, teacher_logits_CV: Tensor, *, beta: float = 0.5) -> Terms:
    """Compare over the whole vocabulary. Logits come divided by the temperature, and finite."""
    compare = find_part("divergence", kind, DISTRIBUTIONS)
    needs_grad = logits_CV.requires_grad and torch.is_grad_enabled()
    return _Full.apply(logits_CV, teacher_logits_CV, compare, beta, needs_grad)


def topk_divergence(
    kind: str,
    logits_CV: Tensor,
    teacher_ids_CK: Tensor,
    teacher_logprobs_CK: Tensor,
    *,
    beta: float = 0.5,
    sampled: SampledTokens | None = None,
) -> Terms:
    """Compare over the teacher's top-k (distinct ids) and the tail. `unbiased_reverse_kl` needs `sampled`.

    Logprobs are normalised over the whole vocabulary, at the temperature that the logits were divided by.
    """
    assert (sampled is not None) == (kind in ON_TOP_K), "the sampled tokens belong to unbiased_reverse_kl"
    compare = reverse_kl if kind in ON_TOP_K else find_part("divergence", kind, DISTRIBUTIONS)
    needs_grad = logits_CV.requires_grad and torch.is_grad_enabled()
    return _TopK.apply(logits_CV, teacher_ids_CK, teacher_logprobs_CK, compare, beta, needs_grad, sampled)


def shared_divergence(
    kind: str, logits_CV: Tensor, ids_CK: Tensor, teacher_logprobs_CK: Tensor, *, beta: float = 0.5
) -> Terms:
    """Compare over the given tokens alone, both sides scaled to sum to 1 there. An id of -1 means no token.

    So a teacher with another vocabulary is compared where it has the student's tokens. With fewer than two of
    them the divergence is 0.
    """
    known_CK = ids_CK >= 0

    def among(values_CK: Tensor) -> Tensor:
        values_CK = values_CK.masked_fill(~known_CK, -torch.inf)
        highest_C1 = values_CK.detach().amax(-1, keepdim=True).clamp_min(_ABSENT)
        return (values_CK - highest_C1).clamp_min(_ABSENT)  # log-ratios must be finite

    own_CK = logits_CV.gather(1, ids_CK.clamp_min(0))
    with torch.no_grad():  # the bits that engines compute; slopes add up to 0, so a normaliser has none
        logprobs_CK = logprobs_at(logits_CV, ids_CK.clamp_min(0))
    own_CK = among(logprobs_CK + (own_CK - own_CK.detach()))
    return full_divergence(kind, own_CK, among(teacher_logprobs_CK.to(own_CK.dtype)), beta=beta)


@torch.no_grad()
def topk_mass(logits_CV: Tensor, ids_CK: Tensor) -> Tensor:
    """Return the student's mass [C] on these tokens. An id of -1 means no token."""
    probs_CK = logprobs_at(logits_CV, ids_CK.clamp_min(0)).exp()
    return probs_CK.masked_fill(ids_CK < 0, 0.0).sum(-1).to(logits_CV.dtype)


@torch.no_grad()
def topk_overlap(logits_CV: Tensor, teacher_ids_CK: Tensor) -> Tensor:
    """Return the share [C] of the teacher's top-k that is in the student's own top-k."""
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
        needs_grad: bool,
    ) -> Terms:
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
        if grad_CV is not None:
            ctx.save_for_backward(grad_CV)
        ctx.mark_non_differentiable(gap_C)
        return loss_C, gap_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_CV,) = ctx.saved_tensors
        return grad_CV * grads[0].unsqueeze(1), None, None, None, None


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        teacher_ids_CK: Tensor,
        teacher_logprobs_CK: Tensor,
        compare: Compare,
        beta: float,
        needs_grad: bool,
        sampled: SampledTokens | None,
    ) -> Terms:
        logprobs_CK = logprobs_at(logits_CV, teacher_ids_CK)
        rest_C1, log_tail_C1 = _student_tail(logits_CV, teacher_ids_CK)
        log_p, log_q = _with_tails(logprobs_CK, log_tail_C1, teacher_logprobs_CK)
        buckets = Buckets(log_p - log_q, log_p.exp(), log_q.exp(), beta)
        gap_C = _entropy_gap(buckets, log_p, log_q).to(logits_CV.dtype)
        terms = compare(buckets)
        loss_C, more = terms.value.sum(-1), ()
        residual = None if sampled is None else _residual(sampled, logits_CV, teacher_ids_CK, buckets)
        if residual is not None:
            loss_C = loss_C + residual.value_C
        if needs_grad:
            # Masses that sum to a little more or less than 1 still give slopes that sum to 0.
            mass_C1, common_C1 = (x.sum(-1, keepdim=True) for x in (buckets.p, terms.pull))
            slope = terms.pull * mass_C1 - buckets.p * common_C1
            if residual is not None:
                slope, more = slope + residual.slope, (residual.ids_C1, residual.pull_C1)
            ctx.save_for_backward(logits_CV, teacher_ids_CK, rest_C1, slope, *more)
        ctx.mark_non_differentiable(gap_C)
        return loss_C.to(logits_CV.dtype), gap_C

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits_CV, ids_CK, rest_C1, slope, *residual = ctx.saved_tensors
        slope = (slope * grads[0].unsqueeze(1)).to(logits_CV.dtype)
        # The softmax of the other tokens; what it gives at the teacher's is overwritten.
        grad_CV = (logits_CV - rest_C1).exp_().mul_(slope[:, -1:])
        grad_CV.scatter_(1, ids_CK, slope[:, :-1])
        if residual:
            token_C1, pull_C1 = residual
            grad_CV.scatter_add_(1, token_C1, (pull_C1 * grads[0].unsqueeze(1)).to(grad_CV.dtype))
        return grad_CV, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Residual:
    """Hold what sampled tokens of the tail add: to the value, to the buckets' slopes, at their logits."""

    value_C: Tensor
    slope: Tensor
    ids_C1: Tensor
    pull_C1: Tensor


def _residual(sampled: SampledTokens, logits_CV: Tensor, ids_CK: Tensor, buckets: Buckets) -> _Residual:
    token_C1, p, tail_C1 = sampled.ids_C.unsqueeze(1), buckets.p, buckets.log_ratio[:, -1:]
    log_p_C1 = logprobs_at(logits_CV, token_C1).double()
    own_C1 = log_p_C1 - sampled.teacher_C.double().unsqueeze(1)
    weight_C1 = (log_p_C1 - sampled.sampler_C.double().unsqueeze(1)).exp()
    weight_C1 = weight_C1.masked_fill((ids_CK == token_C1).any(-1, keepdim=True), 0.0)
    apart_C1 = own_C1 - tail_C1
    slope = -apart_C1 * p
    slope[:, -1:] -= tail_C1
    value_C = (weight_C1 * apart_C1).squeeze(1)
    return _Residual(value_C, weight_C1 * slope, token_C1, weight_C1 * own_C1)


def _entropy_gap(buckets: Buckets, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (buckets.q * log_q).sum(-1) - (buckets.p * log_p).sum(-1)


def _student_tail(logits_CV: Tensor, ids_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of the logits of all other tokens [C, 1], and the log of their mass (float64).

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
    """Return logprobs [C, K + 1] of student and teacher in float64, with the tail's as the last.

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
    """Return the mass [C, 1] that these tokens leave, in float64. Rounding may take it below 0."""
    return -torch.expm1(logprobs_CK.double().logsumexp(-1, keepdim=True))
