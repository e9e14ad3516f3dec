"""What holds for every divergence with every signal it can be computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from practicum.algorithms.divergences import (
    SampledTokens,
    full_divergence,
    sampled_divergence,
    shared_divergence,
    topk_divergence,
)
from practicum.algorithms.token_logprobs import log_distribution
from practicum.recipe.algorithm_traits import ON_DISTRIBUTIONS, ON_TOP_K
from practicum.recipe.checks.divergences import why_dead

from .batches import PAIRS as ALL

PAIRS = [pair for pair in ALL if pair != (pair[0], "shared") or pair[0] in ON_DISTRIBUTIONS]

TOKENS, VOCAB, TOP_K = 40, 300, 16
EITHER_SIGN = ("k1", "k1_straight", *ON_TOP_K)


def noise(seed: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(TOKENS, VOCAB, generator=generator, dtype=dtype)


def scored(logits: Tensor, ids: Tensor) -> Tensor:
    """Logprobs as a teacher's engine gives them."""
    return log_distribution(logits).gather(-1, ids)


def divergence(pair: tuple[str, str], logits: Tensor, teacher: Tensor, *, k: int = TOP_K) -> Tensor:
    """The pair's divergence, from the logits of both; the sampled tokens are fixed."""
    kind, signal = pair
    if signal == "full":
        return full_divergence(kind, logits, teacher)[0]
    tokens = torch.arange(TOKENS) % VOCAB
    if signal == "shared":
        ids = logits.detach().topk(k).indices.clone()
        ids[::3, -1] = -1  # the teacher does not have it
        return shared_divergence(kind, logits, ids, scored(teacher, ids.clamp_min(0)))[0]
    if signal == "student_top_k":
        ids = logits.detach().topk(k).indices
        return topk_divergence(kind, logits, ids, scored(teacher, ids))[0]
    if signal == "top_k":
        ids, sampled = teacher.topk(k).indices, None
        if kind in ON_TOP_K:
            by_both = (scored(x, tokens.unsqueeze(1)).squeeze(1) for x in (teacher, logits.detach()))
            sampled = SampledTokens(tokens, *by_both)
        return topk_divergence(kind, logits, ids, scored(teacher, ids), sampled=sampled)[0]
    ids = tokens.unsqueeze(1)
    return sampled_divergence(kind, scored(logits, ids).squeeze(1), scored(teacher, ids).squeeze(1))


def value_and_gradient(
    pair: tuple[str, str], logits: Tensor, teacher: Tensor, k: int = TOP_K
) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = divergence(pair, logits, teacher, k=k)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("scale", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("k", [1, TOP_K, VOCAB])
def test_a_teacher_equal_to_the_student_gives_exactly_nothing(
    pair: tuple[str, str], scale: float, k: int
) -> None:
    logits = noise(0, scale=scale)
    loss, gradient = value_and_gradient(pair, logits, logits.clone(), k)
    assert loss.count_nonzero() == 0
    if why_dead(*pair, "loss") is None:
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_another_teacher_gives_another_gradient_unless_the_pair_is_called_dead(pair: tuple[str, str]) -> None:
    logits = noise(0)
    _, first = value_and_gradient(pair, logits, noise(1))
    _, second = value_and_gradient(pair, logits, noise(2))
    assert torch.equal(first, second) == (why_dead(*pair, "loss") is not None)
    assert first.count_nonzero() > 0


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] not in EITHER_SIGN], ids="-".join)
def test_a_gradient_step_comes_closer_to_the_teacher(pair: tuple[str, str]) -> None:
    logits, teacher = noise(0, torch.float64, 1.0), noise(1, torch.float64, 1.0)
    before, gradient = value_and_gradient(pair, logits, teacher)
    after, _ = value_and_gradient(pair, logits - 1e-3 * gradient, teacher)
    assert (after < before).all()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_gradients_never_reach_the_teacher(pair: tuple[str, str]) -> None:
    logits, teacher = noise(0).requires_grad_(), noise(1).requires_grad_()
    divergence(pair, logits, teacher).sum().backward()
    assert logits.grad is not None
    assert teacher.grad is None


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_without_gradient_the_values_are_the_same(pair: tuple[str, str]) -> None:
    logits, teacher = noise(0).requires_grad_(), noise(1)
    with torch.no_grad():
        still = divergence(pair, logits, teacher)
    assert not still.requires_grad
    assert torch.equal(still, divergence(pair, logits, teacher))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_no_tokens_give_no_losses(pair: tuple[str, str]) -> None:
    kind, signal = pair
    logits, none = torch.empty(0, VOCAB, requires_grad=True), torch.empty(0)
    found = {
        "full": lambda: full_divergence(kind, logits, torch.empty(0, VOCAB))[0],
        "top_k": lambda: topk_divergence(
            kind,
            logits,
            torch.empty(0, 4).long(),
            torch.empty(0, 4),
            sampled=SampledTokens(none.long(), none, none) if kind in ON_TOP_K else None,
        )[0],
        "student_top_k": lambda: topk_divergence(kind, logits, torch.empty(0, 4).long(), torch.empty(0, 4))[
            0
        ],
        "shared": lambda: shared_divergence(kind, logits, torch.empty(0, 4).long(), torch.empty(0, 4))[0],
        "sampled": lambda: sampled_divergence(kind, logits.sum(-1), none),
    }[signal]()
    assert found.shape == (0,)
    found.sum().backward()
    assert logits.grad is not None
