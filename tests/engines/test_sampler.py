"""Sampling against a slow reference on made-up logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.engines.torch import sampler
from practicum.engines.torch.sampler import Draw, cut, inverse_cdf, sample
from practicum.errors import EngineError

DRAWS = [
    Draw(),
    Draw(temperature=0.6),
    Draw(temperature=1.7),
    Draw(top_k=1),
    Draw(top_k=5),
    Draw(top_k=1000),
    Draw(top_p=0.5),
    Draw(top_p=1e-6),
    Draw(min_p=0.2),
    Draw(temperature=1.3, top_k=7, top_p=0.8, min_p=0.05),
    Draw(temperature=0.5, top_k=20, top_p=0.95),
    Draw(top_p=0.9, min_p=0.1),
]


def reference(logits: list[float], draw: Draw) -> list[float]:
    """Probabilities after temperature, top-k, top-p, min-p: each step a renormalised distribution."""
    probs = [math.exp((x - max(logits)) / draw.temperature) for x in logits]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if draw.top_k:
        order = order[: draw.top_k]
    if draw.top_p < 1:
        total, mass, kept = sum(probs[i] for i in order), 0.0, []
        for i in order:
            if mass >= draw.top_p * total:
                break
            kept.append(i)
            mass += probs[i]
        order = kept
    order = [i for i in order if probs[i] >= draw.min_p * probs[order[0]]]
    total = sum(probs[i] for i in order)
    return [probs[i] / total if i in order else 0.0 for i in range(len(probs))]


def made_up(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_frequencies_and_logprobs_are_those_of_the_reference(draw: Draw):
    count, grid = 20_000, torch.arange(20_000, dtype=torch.float64)
    for logits in made_up(3, 40):
        expected = torch.tensor(reference(logits.tolist(), draw), dtype=torch.float64)
        got = sample(logits.expand(count, -1), draw, (grid + 0.5) / count, torch.arange(count))
        frequencies = torch.bincount(got.tokens_B, minlength=40) / count
        torch.testing.assert_close(frequencies.double(), expected, rtol=0, atol=1.01 / count)
        torch.testing.assert_close(got.logprobs_B, expected[got.tokens_B].log(), rtol=0, atol=1e-12)
        torch.testing.assert_close(got.plain_B, logits.log_softmax(-1)[got.tokens_B], rtol=0, atol=1e-12)


@pytest.mark.parametrize("top_k", [0, 1500])
def test_top_p_looks_further_than_its_first_guess_if_it_must(top_k: int, monkeypatch):
    monkeypatch.setattr(sampler, "_FIRST_LOOK", 8)
    draw = Draw(top_k=top_k, top_p=0.9)
    logits = made_up(4, 2000) / 4
    for row, kept in zip(logits, cut((logits - logits.amax(-1, True)).exp(), draw), strict=True):
        expected = torch.tensor(reference(row.tolist(), draw), dtype=torch.float64)
        assert 8 < int((kept > 0).sum()) < 2000
        torch.testing.assert_close(kept / kept.sum(), expected, rtol=0, atol=1e-12)


def test_top_k_keeps_exactly_k_of_equal_tokens():
    kept = cut(torch.ones(3, 50), Draw(top_k=4))
    assert (kept > 0).sum(-1).tolist() == [4, 4, 4]


def test_greedy_takes_the_best_token_with_its_logprob_at_temperature_1():
    logits = made_up(50, 30).float()
    got = sample(logits, Draw(greedy=True), torch.zeros(50, dtype=torch.float64), torch.arange(50))
    assert torch.equal(got.tokens_B, logits.argmax(-1))
    torch.testing.assert_close(got.logprobs_B, logits.log_softmax(-1).amax(-1))
    assert torch.equal(got.logprobs_B, got.plain_B)


def test_logits_of_bfloat16_are_sampled_in_float32():
    logits = made_up(20, 30).bfloat16()
    got = sample(logits, Draw(), torch.full((20,), 0.4, dtype=torch.float64), torch.arange(20))
    exact = logits.double().log_softmax(-1).gather(-1, got.tokens_B.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(got.logprobs_B.double(), exact, rtol=0, atol=1e-6)


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 0.25, 1.0]), min_size=2, max_size=12).filter(any),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-52), st.just(0.0)),
)
def test_inverse_cdf_takes_the_token_whose_interval_holds_the_number(weights: list[float], uniform: float):
    uniform = min(uniform, 1 - 2.0**-52)
    tokens, totals = inverse_cdf(
        torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64), torch.tensor([0])
    )
    single = torch.tensor(weights).double().tolist()
    token, target, running = int(tokens), uniform * float(totals), 0.0
    assert single[token] > 0
    for weight in single[:token]:
        running += weight
    assert running <= target < running + single[token] or math.isclose(running, target)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("draw", [Draw(), Draw(greedy=True), Draw(temperature=2.0, top_k=3)], ids=str)
def test_logits_that_are_not_finite_are_an_error(bad: float, draw: Draw):
    logits = made_up(4, 10)
    logits[2, 3] = bad
    with pytest.raises(EngineError, match="not finite"):
        sample(logits, draw, torch.full((4,), 0.5, dtype=torch.float64), torch.arange(4))


def test_tokens_that_the_model_rules_out_are_never_sampled():
    logits = made_up(1, 10).expand(1000, -1).clone()
    logits[:, ::2] = float("-inf")
    got = sample(logits, Draw(), torch.arange(1000, dtype=torch.float64) / 1000, torch.arange(1000))
    assert bool((got.tokens_B % 2 == 1).all())
