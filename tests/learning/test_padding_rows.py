"""Rows without a sampled token, as padding rows are, change not one bit of an update."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.dataplane.ragged import Ragged
from practicum.learning.objective import DistillSettings
from practicum.learning.packing import RowExtras
from practicum.learning.update_batch import CriticBatch, UpdateBatch
from practicum.learning.value_learner import ValueLearner
from practicum.recipe.schema.algorithm_sections import Algorithm, Kl
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train
from practicum.recipe.schema.teacher_sections import Distill

from .distilled import taught
from .reference import random_batch, tiny, with_padding
from .updates import learn

TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", weight_decay=0.1, max_grad_norm=0.5)
LOSSES = ("supervised", "ppo_clip", "gspo", "cispo", "dppo", "reinforce")
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
MODEL = tiny(dtype=torch.float32)
places = st.lists(st.integers(0, 30), min_size=1, max_size=9)


def only_padding(batch: UpdateBatch) -> UpdateBatch:
    """Two padding rows with the batch's columns."""
    padded = with_padding(batch, [0, 0])
    columns = {
        f.name: getattr(padded, f.name).select([0, 1])
        for f in fields(padded)
        if isinstance(getattr(padded, f.name), Ragged)
    }
    return replace(padded, **columns, sessions=[-1, -1])


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10**6),
    places=places,
    budget=st.sampled_from([20, 50, 2048]),
    aggregation=st.sampled_from(AGGREGATIONS),
    whole=st.booleans(),
)
def test_the_student_s_update_is_bit_identical_with_padding_rows(
    loss, seed, places, budget, aggregation, whole
):
    batch = random_batch(seed, flat_groups=1)
    if not whole:
        tokens = {s: 7 * i + 40 for i, s in enumerate(dict.fromkeys(batch.sessions))}
        batch = replace(batch, session_tokens=[tokens[s] for s in batch.sessions])
    algorithm = Algorithm(
        loss=loss,
        advantage="none" if loss == "supervised" else "grpo",
        aggregation=aggregation,
        kl=Kl(place="off" if loss == "supervised" else "loss"),
    )
    without, metrics = learn(MODEL, batch, TRAIN, algorithm, budget=budget)
    mine, same = learn(MODEL, with_padding(batch, places), TRAIN, algorithm, budget=budget)
    assert same == metrics
    for name, weight in without.weights.items():
        assert torch.equal(mine.weights[name], weight), name


@pytest.mark.parametrize("signal", ["sampled", "top_k"])
def test_teachers_do_not_see_padding_rows(signal):
    distill = Distill(signal=signal, divergence="forward_kl" if signal == "top_k" else "k2", apply_as="loss")
    teaching = DistillSettings(distill, 1.0, shares={0: 0.7, 1: 0.3})
    batch = taught(random_batch(4))
    algorithm, model = Algorithm(loss="ppo_clip"), tiny()
    without, metrics = learn(model, batch, TRAIN, algorithm, budget=40, teaching=teaching)
    padded = with_padding(batch, [0, 2, 2, 30])
    mine, same = learn(model, padded, TRAIN, algorithm, budget=40, teaching=teaching)
    assert same == metrics
    for name, weight in without.weights.items():
        assert torch.equal(mine.weights[name], weight), name


def recorded(batch: UpdateBatch) -> UpdateBatch:
    """The batch with experts made up for each token."""
    pairs = zip(batch.prompt_ids.lengths, batch.response_ids.lengths, strict=True)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.rand(p + r, 2, 6, generator=generator).topk(2).indices for p, r in pairs]
    return replace(batch, extras=RowExtras(routed_experts=Ragged.from_rows(rows)))


def test_routers_are_not_counted_over_padding_rows():
    model, batch = tiny("qwen3_moe", torch.float32), recorded(random_batch(3))
    algorithm = Algorithm(loss="ppo_clip")
    without, metrics = learn(model, batch, TRAIN, algorithm, budget=40)
    mine, same = learn(model, with_padding(batch, [0, 1, 5, 30]), TRAIN, algorithm, budget=40)
    assert {"router_load_max", "router_unused", "router_moved"} <= metrics.keys()
    assert same == metrics
    for name, weight in without.weights.items():
        assert torch.equal(mine.weights[name], weight), name


@pytest.mark.parametrize("loss", LOSSES)
def test_an_update_of_nothing_but_padding_changes_nothing(loss):
    algorithm = Algorithm(loss=loss, advantage="none" if loss == "supervised" else "grpo")
    mine, metrics = learn(MODEL, only_padding(random_batch(1)), TRAIN, algorithm)
    assert metrics == {"tokens": 0.0}
    assert not mine.grads
    assert all(torch.equal(mine.weights[name], w) for name, w in MODEL.named_parameters())


def critic_batch(batch: UpdateBatch) -> CriticBatch:
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    ids = (batch.prompt_ids, batch.response_ids, batch.response_mask)
    return CriticBatch(*ids, values=batch.old_logprobs, returns=batch.advantages, extras=batch.extras)


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), places=places, budget=st.sampled_from([20, 50, 2048]))
def test_the_critic_s_update_is_bit_identical_with_padding_rows(seed, places, budget):
    batch = random_batch(seed)
    critics = [ValueLearner(MODEL, TRAIN, CriticRecipe(lr=0.01)) for _ in range(2)]
    found = []
    for critic, given_rows in zip(critics, (batch, with_padding(batch, places)), strict=True):
        critic.trunk.token_budget = budget
        found.append(critic.update(critic_batch(given_rows)))
    assert found[0] == found[1]
    for mine, theirs in zip(*(critic.model.parameters() for critic in critics), strict=True):
        assert torch.equal(mine, theirs)


def test_a_critic_s_update_of_nothing_but_padding_changes_nothing():
    critic = ValueLearner(MODEL, TRAIN, CriticRecipe(lr=0.01))
    before = copy.deepcopy(critic.model.state_dict())
    assert critic.update(critic_batch(only_padding(random_batch(1)))) == {"tokens": 0.0}
    assert critic.version == 0
    assert all(torch.equal(before[name], w) for name, w in critic.model.state_dict().items())
