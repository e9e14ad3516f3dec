"""The student's update by teachers with another tokenizer, against autograd over padded rows."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from practicum.dataplane.fields import NO_MATCH, SAME_TOKENS, SHARED_TOKEN
from practicum.dataplane.ragged import Ragged
from practicum.learning.update_batch import UpdateBatch
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .distilled import STUDENT, padded, taught, teaching
from .reference import random_batch
from .updates import learn

TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", max_grad_norm=None)


def matched(batch: UpdateBatch, seed: int) -> UpdateBatch:
    """The batch as the signal `shared` has it: some tokens are not compared, some of the top-k missing."""
    assert batch.teachers is not None
    assert batch.teachers.topk_ids is not None
    g, ids_MK = torch.Generator().manual_seed(seed), batch.teachers.topk_ids.values.clone()
    lengths = batch.response_ids.lengths
    match_M = torch.randint(0, 3, (len(ids_MK),), generator=g)
    missing_MK = torch.rand(ids_MK.shape, generator=g) < 0.3
    ids_MK[(match_M == SHARED_TOKEN).unsqueeze(1) & missing_MK] = -1
    ids_MK[match_M == NO_MATCH] = -1
    columns = {"topk_ids": Ragged.packed(ids_MK, lengths), "match": Ragged.packed(match_M, lengths)}
    return replace(batch, teachers=replace(batch.teachers, **columns))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "k1_straight"])
def test_only_tokens_of_both_are_compared_and_denominators_stay(divergence: str, temperature: float) -> None:
    batch = matched(taught(random_batch(7, groups=4), temperature=temperature), 5)
    how = teaching(divergence, "shared", temperature=temperature)
    mine, metrics = learn(STUDENT, batch, TRAIN, Algorithm(), teaching=how)
    assert batch.teachers is not None
    assert batch.teachers.match is not None
    teachers, model = batch.teachers, copy.deepcopy(STUDENT)
    logprobs_MV = (padded(model, batch)[1] / temperature).log_softmax(-1)
    sampled_M, total = batch.response_mask.values.bool(), torch.zeros((), dtype=torch.float64)
    assert teachers.topk_ids is not None
    assert teachers.topk_logprobs is not None
    assert teachers.match is not None
    for i in sampled_M.nonzero().squeeze(1).tolist():
        match, ids, best = (x.values[i] for x in (teachers.match, teachers.topk_ids, teachers.topk_logprobs))
        if match == NO_MATCH:
            continue
        token = batch.response_ids.values[i]
        if divergence == "k1_straight":
            d = logprobs_MV[i, token] - teachers.logprobs.values[i]
            total = total + d.detach() + d**2 / 2 - (d**2 / 2).detach()
            continue
        own, theirs = logprobs_MV[i, ids[ids >= 0]], best[ids >= 0]
        if match == SHARED_TOKEN:
            own, theirs = own.log_softmax(-1), theirs.log_softmax(-1)
        else:
            own, theirs = (torch.cat([x, torch.log1p(-x.exp().sum()).unsqueeze(0)]) for x in (own, theirs))
        a, b = (own, theirs) if divergence == "reverse_kl" else (theirs, own)
        total = total + (a.exp() * (a - b)).sum()
    loss = total / sampled_M.sum()
    loss.backward()
    assert mine.loss == pytest.approx(float(loss.detach()), rel=1e-8)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(mine.grads[name], p.grad, rtol=1e-7, atol=1e-9)
    known = (teachers.match.values[sampled_M] != NO_MATCH).double().mean()
    assert metrics["teacher_coverage"] == pytest.approx(float(known))


@pytest.mark.parametrize(("divergence", "other"), [("reverse_kl", "top_k"), ("k2", "sampled")])
def test_a_teacher_with_the_same_tokenizer_teaches_as_without_alignment_bit_for_bit(
    divergence: str, other: str
) -> None:
    batch = taught(random_batch(8, groups=4))
    assert batch.teachers is not None
    same = Ragged.packed(
        torch.full((sum(batch.response_ids.lengths),), SAME_TOKENS), batch.response_ids.lengths
    )
    aligned = replace(batch, teachers=replace(batch.teachers, match=same))
    one, _ = learn(STUDENT, aligned, TRAIN, Algorithm(), teaching=teaching(divergence, "shared"))
    plain, _ = learn(STUDENT, batch, TRAIN, Algorithm(), teaching=teaching(divergence, other))
    assert one.loss == plain.loss
    assert all(torch.equal(one.grads[name], plain.grads[name]) for name in plain.grads)
