"""Logprobs equal those of a plain forward, in chunks or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from practicum.cpu.batch_invariance import ROWS
from practicum.learning.logprobs import LogprobScorer, map_logits, token_logprobs
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.fingerprint import LENGTH, fingerprint_ids
from practicum.recipe.schema.recipe import Train

from .reference import FAMILIES, VOCAB, padded_tokens, random_batch, tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scorer_equals_log_softmax_of_a_plain_forward(family, temperature):
    model, batch = tiny(family), random_batch(11)
    trunk = PackedModel(model, Train(microbatch_tokens=20))
    column = LogprobScorer(trunk).logprobs(batch.prompt_ids, batch.response_ids, temperature=temperature)
    asked: dict[str, Any] = {"temperature": temperature, "entropy": True, "plain": True}
    answered = [row for row, length in enumerate(batch.response_ids.lengths) if length]
    packed = RowSpans(batch.prompt_ids, batch.response_ids).pack(answered)
    mine = token_logprobs(model, trunk.hidden(packed), packed.target_M, **asked)
    theirs = padded_tokens(model, batch, temperature)
    assert column.lengths == batch.response_ids.lengths
    assert column.values.dtype == torch.float32
    torch.testing.assert_close(column.values.double(), theirs.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.entropy_M, theirs.entropy[packed.column_M], rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.plain_M, theirs.plain[packed.column_M], rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7])
def test_chunks_give_the_same_numbers_and_gradients_and_bound_the_logits(chunk_tokens):
    model = tiny()
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 32, generator=g, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (17,), generator=g)
    results = []
    for limit in (10**6, chunk_tokens * VOCAB):
        leaf = hidden.clone().requires_grad_()
        found = token_logprobs(
            model,
            leaf,
            target,
            temperature=0.7,
            entropy=True,
            entropy_grad=True,
            plain=True,
            chunk_logits=limit,
        )
        assert found.entropy_M is not None
        head = model.get_parameter("lm_head.weight")
        loss = (found.logprobs_M * torch.linspace(-1, 2, 17)).sum() + (found.entropy_M**2).sum()
        results.append([*(x for x in (found.logprobs_M, found.entropy_M, found.plain_M)), loss])
        results[-1] += torch.autograd.grad(loss, [leaf, head])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-12, atol=1e-12)

    sizes = []

    def reduce(logits_CV, rows):
        sizes.append(logits_CV.shape[0])
        assert rows.stop - rows.start == logits_CV.shape[0]
        return (logits_CV.sum(-1),)

    map_logits(model, hidden, reduce, chunk_logits=chunk_tokens * VOCAB)
    assert max(sizes) <= max(chunk_tokens, ROWS)
    assert sum(sizes) == 17


def test_entropy_gradient_flows_only_if_asked_for():
    model = tiny()
    hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    target = torch.tensor([1, 2, 3])
    without = token_logprobs(model, hidden, target, entropy=True, plain=True)
    assert without.entropy_M is not None
    assert without.plain_M is not None
    assert not without.entropy_M.requires_grad
    assert not without.plain_M.requires_grad
    entropy_M = token_logprobs(model, hidden, target, entropy=True, entropy_grad=True).entropy_M
    assert entropy_M is not None
    (mine,) = torch.autograd.grad(entropy_M.sum(), hidden)
    probabilities = (hidden @ model.get_parameter("lm_head.weight").T).softmax(-1)
    slow = torch.distributions.Categorical(probs=probabilities).entropy().sum()
    torch.testing.assert_close(mine, torch.autograd.grad(slow, hidden)[0], rtol=1e-9, atol=1e-12)


def test_bfloat16_logits_are_normalised_in_float32():
    model = tiny(dtype=torch.bfloat16)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = token_logprobs(model, hidden, torch.arange(5), temperature=0.9)
    assert found.logprobs_M.dtype == torch.float32


def test_fingerprint_tells_other_weights_apart():
    model = tiny(dtype=torch.float32)
    scorer = LogprobScorer(PackedModel(model, Train()))
    first = scorer.fingerprint()
    ids = torch.tensor([fingerprint_ids(VOCAB)])
    plain = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert first.shape == (LENGTH - 1,)
    torch.testing.assert_close(first, plain.detach(), rtol=0, atol=1e-5)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").mul_(1.01)
    assert not torch.allclose(first, scorer.fingerprint(), atol=1e-4)
