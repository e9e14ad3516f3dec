"""Divergences of distributions, on the full vocabulary and on the top-k with its tail."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum.algorithms import token_logprobs
from practicum.algorithms.divergences import (
    DISTRIBUTIONS,
    SampledTokens,
    full_divergence,
    topk_divergence,
    topk_overlap,
)

from .batches import law

KINDS = sorted(DISTRIBUTIONS)
BETAS = [0.1, 0.5, 0.8]
SETTINGS = [(kind, beta) for kind in KINDS for beta in (BETAS if kind == "jsd" else [0.5])]
TOKENS, VOCAB, TOP_K = 6, 11, 4

Pair = tuple[Tensor, Tensor]


def noise(seed: int, *shape: int, scale: float = 1.5, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*(shape or (TOKENS, VOCAB)), generator=generator, dtype=dtype)


def signs(seed: int, dtype: torch.dtype, size: float) -> Tensor:
    """Logits of ± size."""
    return torch.where(noise(seed, TOKENS, 50, dtype=dtype) > 0, size, -size).to(dtype)


def top(teacher: Tensor, k: int) -> Pair:
    """The teacher's top-k: ids and logprobs."""
    best = teacher.log_softmax(-1).topk(k)
    return best.indices, best.values


def coarse(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Logprobs of the tokens and of all others together, by plain sums."""
    rest = logprobs.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), rest.log()], dim=-1)


def plain(kind: str, beta: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The textbook's formulas on logprobs; autograd does the rest."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if kind != "jsd":
        return kl(log_q, log_p) if kind == "forward_kl" else kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def with_gradient(loss: Tensor, logits: Tensor) -> Pair:
    weights = torch.linspace(0.5, 2.0, len(loss), dtype=loss.dtype)
    return loss.detach(), torch.autograd.grad((loss * weights).sum(), logits)[0]


def assert_same(found: Pair, expected: Pair, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("kind", "expected"), [("forward_kl", 0.5108), ("reverse_kl", 0.3681), ("jsd", 0.1018)]
)
def test_values_by_hand(kind: str, expected: float) -> None:
    # KL((.5 .5) || (.9 .1)), KL((.9 .1) || (.5 .5)), and half of both to (.7 .3).
    student, teacher = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert full_divergence(kind, student, teacher)[0].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
def test_full_vocabulary_against_autograd(kind: str, beta: float) -> None:
    logits, teacher = noise(0).requires_grad_(), noise(1)
    expected = plain(kind, beta, logits.log_softmax(-1), teacher.log_softmax(-1))
    found = full_divergence(kind, logits, teacher, beta=beta)[0]
    assert_same(with_gradient(found, logits), with_gradient(expected, logits))


@pytest.mark.parametrize("k", [1, TOP_K, VOCAB - 1])
@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
def test_top_k_and_tail_against_autograd(kind: str, beta: float, k: int) -> None:
    logits, teacher = noise(0).requires_grad_(), noise(1)
    ids, best = top(teacher, k)
    expected = plain(kind, beta, coarse(logits.log_softmax(-1), ids), coarse(teacher.log_softmax(-1), ids))
    found = topk_divergence(kind, logits, ids, best, beta=beta)[0]
    assert_same(with_gradient(found, logits), with_gradient(expected, logits))


@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
def test_gradients_against_finite_differences(kind: str, beta: float) -> None:
    logits, teacher = noise(0, 3, 7).requires_grad_(), noise(1, 3, 7)
    ids, best = top(teacher, 3)
    assert torch.autograd.gradcheck(lambda z: full_divergence(kind, z, teacher, beta=beta)[0], logits)
    assert torch.autograd.gradcheck(lambda z: topk_divergence(kind, z, ids, best, beta=beta)[0], logits)


@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
def test_float32_agrees_with_float64(kind: str, beta: float) -> None:
    # A student so near that its divergence is a tiny difference of large numbers.
    teacher = noise(1, 8, 5000, scale=4.0, dtype=torch.float32)
    for distance in (1e-3, 1.0):
        near = teacher + noise(2, 8, 5000, scale=distance, dtype=torch.float32)
        ids, _ = top(teacher, 32)
        results: list[tuple[Pair, Pair]] = []
        for dtype in (torch.float32, torch.float64):
            logits, other = near.to(dtype).requires_grad_(), teacher.to(dtype)
            best = other.log_softmax(-1).gather(-1, ids)
            full = full_divergence(kind, logits, other, beta=beta)[0]
            small = topk_divergence(kind, logits, ids, best, beta=beta)[0]
            results.append((with_gradient(full, logits), with_gradient(small, logits)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-3, atol=1e-7 * distance)
            torch.testing.assert_close(found[1].double(), expected[1], rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
@pytest.mark.parametrize("size", [20.0, 80.0])
def test_extreme_logits_stay_finite_and_right(kind: str, beta: float, size: float) -> None:
    logits, teacher = signs(0, torch.float32, size).requires_grad_(), signs(1, torch.float32, size)
    found = with_gradient(full_divergence(kind, logits, teacher, beta=beta)[0], logits)
    wide = logits.detach().double().requires_grad_()
    expected = plain(kind, beta, wide.log_softmax(-1), teacher.double().log_softmax(-1))
    assert_same(found, with_gradient(expected, wide), rtol=1e-4, atol=1e-6)
    ids, best = top(teacher, 3)
    small = with_gradient(topk_divergence(kind, logits, ids, best, beta=beta)[0], logits)
    assert all(part.isfinite().all() for part in small)


@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
def test_top_k_of_the_whole_vocabulary_is_the_full_divergence(kind: str, beta: float) -> None:
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        logits, teacher = noise(0, dtype=dtype).requires_grad_(), noise(1, dtype=dtype)
        whole = topk_divergence(kind, logits, *top(teacher, VOCAB), beta=beta)[0]
        full = full_divergence(kind, logits, teacher, beta=beta)[0]
        assert_same(with_gradient(whole, logits), with_gradient(full, logits), rtol=rtol, atol=1e-6)


@st.composite
def logit_pairs(draw: st.DrawFn, reach: float = 12.0) -> Pair:
    vocab = draw(st.integers(2, 12))
    row = st.lists(st.floats(-reach, reach, width=32), min_size=vocab, max_size=vocab)
    student, teacher = draw(
        st.lists(st.tuples(row, row), min_size=1, max_size=3).map(lambda x: zip(*x, strict=True))
    )
    return torch.tensor(list(student)), torch.tensor(list(teacher))


@given(pair=logit_pairs(), setting=st.sampled_from(SETTINGS), data=st.data())
@law
def test_divergences_are_not_negative_and_a_coarser_view_is_no_greater(
    pair: Pair, setting: tuple[str, float], data: st.DataObject
) -> None:
    kind, beta = setting
    student, teacher = pair
    k = data.draw(st.integers(1, teacher.shape[1]))
    small = full = torch.zeros(0)
    # Float64 comes last: in float32, a small tail, 1 minus the rest, has too few digits for the second law.
    for dtype in (torch.float32, torch.float64):
        logits, other = student.to(dtype), teacher.to(dtype)
        full = full_divergence(kind, logits, other, beta=beta)[0]
        small = topk_divergence(kind, logits, *top(other, k), beta=beta)[0]
        assert (full >= 0).all()
        assert (small >= 0).all()
    # The floor adds at most itself to the tail's mass, times the log-ratio there.
    assert (small <= full + 3e-5).all()


@given(pair=logit_pairs(), setting=st.sampled_from(SETTINGS), seed=st.integers(0, 99))
@law
def test_the_order_of_the_vocabulary_does_not_matter(
    pair: Pair, setting: tuple[str, float], seed: int
) -> None:
    kind, beta = setting
    student, teacher = (x.double() for x in pair)
    vocab = teacher.shape[1]
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    ids, best = top(teacher, max(1, vocab // 2))
    results = []
    for shuffle in (torch.arange(vocab), order):
        logits = student[:, shuffle].requires_grad_()
        loss = full_divergence(kind, logits, teacher[:, shuffle], beta=beta)[0]
        loss = loss + topk_divergence(kind, logits, shuffle.argsort()[ids], best, beta=beta)[0]
        value, gradient = with_gradient(loss, logits)
        results.append((value, gradient[:, shuffle.argsort()]))
    assert_same(results[0], results[1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("kind", "beta"), SETTINGS)
def test_chunks_and_blocks_change_nothing(kind: str, beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, teacher = noise(0).requires_grad_(), noise(1)
    ids, best = top(teacher, TOP_K)

    def both(rows: slice) -> Tensor:
        full = full_divergence(kind, logits[rows], teacher[rows], beta=beta)[0]
        return full + topk_divergence(kind, logits[rows], ids[rows], best[rows], beta=beta)[0]

    whole = with_gradient(both(slice(None)), logits)
    chunked = torch.cat([both(slice(i, i + 4)) for i in range(0, TOKENS, 4)])
    assert_same(with_gradient(chunked, logits), whole, rtol=1e-13)
    monkeypatch.setattr(token_logprobs, "BLOCK_LOGITS", 2 * VOCAB)
    assert_same(with_gradient(both(slice(None)), logits), whole, rtol=1e-13)


def test_jsd_goes_to_forward_kl_with_beta_to_0_and_to_reverse_kl_with_beta_to_1() -> None:
    small = 1e-6
    for end, kind in ((small, "forward_kl"), (1 - small, "reverse_kl")):
        logits, teacher = noise(0).requires_grad_(), noise(1)
        scaled = full_divergence("jsd", logits, teacher, beta=end)[0] / small
        limit = full_divergence(kind, logits, teacher)[0]
        assert_same(with_gradient(scaled, logits), with_gradient(limit, logits), rtol=1e-3, atol=1e-4)


def test_jsd_is_symmetric_and_bounded() -> None:
    one, other = signs(0, torch.float64, 40.0), signs(1, torch.float64, 40.0)
    found = full_divergence("jsd", one, other, beta=0.3)[0]
    torch.testing.assert_close(found, full_divergence("jsd", other, one, beta=0.7)[0])
    assert (found <= -(0.3 * math.log(0.3) + 0.7 * math.log(0.7)) + 1e-12).all()
    assert (found > 0).all()


def test_the_gradient_of_a_tail_that_float32_would_round_to_nothing() -> None:
    logits = torch.tensor([[20.0, 0.0, 0.0, 0.0]], requires_grad=True)
    loss = topk_divergence("forward_kl", logits, torch.tensor([[0]]), torch.tensor([[0.5]]).log())[0]
    value, gradient = with_gradient(2 * loss, logits)  # the first weight is 0.5
    assert value.item() / 2 == pytest.approx(8.757528, abs=2e-5)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, -1 / 6, -1 / 6, -1 / 6]]), rtol=1e-6, atol=0)


@given(
    rows=st.lists(st.lists(st.floats(-4, 4, width=32), min_size=7, max_size=7), min_size=1, max_size=3),
    ahead=st.floats(0, 80, width=32),
    best=st.lists(st.floats(0.05, 0.4), min_size=2, max_size=2),
    setting=st.sampled_from(SETTINGS),
)
@law
def test_a_small_tail_of_the_student_has_the_value_and_gradient_of_float64(
    rows: list[list[float]], ahead: float, best: list[float], setting: tuple[str, float]
) -> None:
    # The student puts more and more on the teacher's tokens, the teacher 0.2 to 0.9 on all others.
    kind, beta = setting
    logits = (torch.tensor(rows) + ahead * torch.tensor([1.0, 1, 0, 0, 0, 0, 0])).requires_grad_()
    ids, said = torch.tensor([[0, 1]] * len(rows)), torch.tensor([best] * len(rows)).log()
    found = with_gradient(topk_divergence(kind, logits, ids, said, beta=beta)[0], logits)
    wide = logits.detach().double().requires_grad_()
    rest = wide.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_p = torch.cat([wide.gather(1, ids), rest], dim=-1) - wide.logsumexp(-1, keepdim=True)
    masses = said.double().exp()
    log_q = torch.cat([masses, 1 - masses.sum(-1, keepdim=True)], dim=-1).log()
    expected = with_gradient(plain(kind, beta, log_p, log_q), wide)
    assert_same(found, expected, rtol=2e-5, atol=2e-6)


@given(ahead=st.floats(0, 60), kind=st.sampled_from(KINDS))
@law
def test_a_tail_of_the_teacher_that_rounding_hides_leaves_the_loss_finite_and_pulls_the_student_off_its_own(
    ahead: float, kind: str
) -> None:
    teacher = torch.tensor([[ahead, 0.0, 0.0, 0.0]])
    logits = torch.tensor([[1.0, 0.0, 0.5, -0.5]], requires_grad=True)
    ids, said = torch.tensor([[0]]), teacher.log_softmax(-1)[:, :1]
    loss, gradient = with_gradient(topk_divergence(kind, logits, ids, said)[0], logits)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert (gradient[0, 0] < 0) == (ahead > math.log(3 / (1 / logits.softmax(-1)[0, 0].item() - 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1e-12, 1e-9, 1e-6, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12])
def test_jsd_is_finite_and_right_with_beta_next_to_0_or_1(dtype: torch.dtype, beta: float) -> None:
    limit, kind = (beta, "forward_kl") if beta < 0.5 else (1 - beta, "reverse_kl")
    logits, teacher = noise(0, dtype=dtype).requires_grad_(), noise(1, dtype=dtype)
    scaled = full_divergence("jsd", logits, teacher, beta=beta)[0] / limit
    expected = with_gradient(full_divergence(kind, logits, teacher)[0], logits)
    assert_same(with_gradient(scaled, logits), expected, rtol=1e-3, atol=1e-4)
    # Where one has next to nothing of what the other is sure of, log(p / m) is as long as log(beta).
    far, sure = torch.tensor([[40.0, 0.0]], dtype=dtype), torch.tensor([[0.0, 40.0]], dtype=dtype)
    found = full_divergence("jsd", far, sure, beta=beta)[0]
    entropy = -(beta * math.log(beta) + (1 - beta) * math.log1p(-beta))
    assert found.item() == pytest.approx(entropy, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_tensor_of_the_logits_size_is_kept_for_the_backward_pass(kind: str) -> None:
    logits, teacher = noise(0).requires_grad_(), noise(1)
    ids, best = top(teacher, TOP_K)
    for run in (
        lambda: full_divergence(kind, logits, teacher),
        lambda: topk_divergence(kind, logits, ids, best),
    ):
        kept: list[int] = []

        def keep(x: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run()
        assert sum(size >= logits.numel() for size in kept) == 1


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    logits = noise(0).requires_grad_()
    weights = torch.ones(TOKENS, dtype=torch.float64, requires_grad=True)
    loss = (full_divergence("reverse_kl", logits, noise(1))[0] * weights).sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_entropy_gap_is_that_of_the_buckets_compared() -> None:
    student, teacher = (
        torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(s)).double() for s in (1, 2)
    )
    ids, best = top(teacher, 3)
    found = {
        "full": full_divergence("reverse_kl", student, teacher),
        "top_k": topk_divergence("forward_kl", student, ids, best),
    }
    buckets = {"full": lambda x: x.log_softmax(-1), "top_k": lambda x: coarse(x.log_softmax(-1), ids)}
    for signal, view in buckets.items():
        mine, theirs = (torch.distributions.Categorical(logits=view(x)).entropy() for x in (student, teacher))
        torch.testing.assert_close(found[signal][1], mine - theirs)


def test_overlap_counts_what_both_rank_highest() -> None:
    student = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    found = topk_overlap(student, torch.tensor([[1, 0], [0, 3]]))
    assert found.tolist() == [1.0, 0.5]
    assert not found.requires_grad


@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_unbiased_top_k_is_the_full_reverse_kl_in_expectation(k: int, on_policy: bool) -> None:
    vocab = 9
    student, teacher = noise(1, TOKENS, vocab), noise(2, TOKENS, vocab)
    sampler = student if on_policy else noise(3, TOKENS, vocab)
    mu, log_q = sampler.log_softmax(-1), teacher.log_softmax(-1)
    logits = student.clone().requires_grad_()
    full = with_gradient(full_divergence("reverse_kl", logits, teacher)[0], logits)
    values, gradients = torch.zeros(TOKENS, dtype=torch.float64), torch.zeros_like(student)
    for token in range(vocab):
        sampled = SampledTokens(torch.full((TOKENS,), token), log_q[:, token], mu[:, token])
        loss = topk_divergence("unbiased_reverse_kl", logits, *top(teacher, k), sampled=sampled)[0]
        value, gradient = with_gradient(loss, logits)
        values += mu[:, token].exp() * value
        gradients += mu[:, token].exp().unsqueeze(1) * gradient
    assert_same((values, gradients), full, rtol=0.0, atol=1e-12)
    if k < vocab:
        coarser = with_gradient(topk_divergence("reverse_kl", logits, *top(teacher, k))[0], logits)
        assert (coarser[1] - full[1]).abs().max() > 1e-3
