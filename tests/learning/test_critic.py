"""The critic: values before each token, and the same update however it is cut."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.algorithms.losses import value_loss
from practicum.dataplane.ragged import Ragged
from practicum.errors import CheckError
from practicum.learning.update_batch import CriticBatch
from practicum.learning.value_learner import VALUE_CLIP, ValueLearner
from practicum.observe.metrics import METRICS
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train

from .reference import FAMILIES, random_batch, tiny, with_shared_beginnings

TRAIN = Train(lr=0.02, optimizer="tests.learning.optimizers:steady", weight_decay=0.1, max_grad_norm=0.5)
RECIPE = CriticRecipe(lr=0.01)


def made_up(seed):
    b = with_shared_beginnings(random_batch(seed))
    assert b.advantages is not None
    assert b.old_logprobs is not None
    return CriticBatch(b.prompt_ids, b.response_ids, b.response_mask, b.old_logprobs, b.advantages)


def critic_with_a_head(family="qwen3", recipe=RECIPE):
    critic = ValueLearner(tiny(family), TRAIN, recipe)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.5, 0.5, 32))
    return critic


def slow_values(critic, batch):
    """One row at a time by the model's own forward."""
    base = copy.deepcopy(critic.trunk.model)
    base.set_attn_implementation("sdpa")
    head = copy.deepcopy(critic.head)
    values = []
    for prompt, response in zip(batch.prompt_ids.rows, batch.response_ids.rows, strict=True):
        hidden = base(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
        values.append(head(hidden[len(prompt) - 1 : len(prompt) + len(response) - 1])[:, 0])
    return torch.cat(values), [*base.parameters(), *head.parameters()]


def test_values_start_at_zero_and_the_student_is_not_touched():
    student = tiny()
    before = copy.deepcopy(student.state_dict())
    critic, batch = ValueLearner(student, TRAIN, RECIPE), made_up(1)
    assert not critic.values(batch.prompt_ids, batch.response_ids).values.any()
    critic.update(batch)
    assert critic.values(batch.prompt_ids, batch.response_ids).values.any()
    for name, weight in student.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_of_the_state_before_each_token(family):
    critic, batch = critic_with_a_head(family), made_up(2)
    critic.trunk.token_budget = 25
    mine = critic.values(batch.prompt_ids, batch.response_ids)
    assert mine.lengths == batch.response_ids.lengths
    assert mine.values.dtype == torch.float32
    theirs, _ = slow_values(critic, batch)
    torch.testing.assert_close(mine.values.double(), theirs.detach(), rtol=1e-6, atol=1e-6)


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), budget=st.sampled_from([1, 20, 10**6]))
def test_update_equals_a_slow_one_under_any_cut(seed, budget):
    critic, batch = critic_with_a_head(), made_up(seed)
    critic.trunk.token_budget = budget
    values, parameters = slow_values(critic, batch)
    mask = batch.response_mask.values
    old, wanted = batch.values.values.double(), batch.returns.values.double()
    loss = value_loss(values, old, wanted, VALUE_CLIP)[0][mask].mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=0.01, eps=1e-3, foreach=False).step()
    metrics = critic.update(batch)
    assert metrics["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    assert metrics["lr"] == 0.01
    for mine, theirs in zip(critic.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


def test_metrics_are_documented_and_explained_variance_is_right():
    critic, batch = critic_with_a_head(), made_up(3)
    metrics = critic.update(replace(batch, values=batch.returns))
    assert all({f"train/{name}", f"critic/{name}"} & METRICS.keys() for name in metrics)
    assert metrics["explained_variance"] == 1.0
    sampled = batch.returns.values[batch.response_mask.values]
    assert metrics["value_mean"] == pytest.approx(float(sampled.mean()), rel=1e-5)
    assert critic.version == 1


def test_nothing_sampled_does_nothing_and_a_bad_return_is_refused():
    critic, batch = critic_with_a_head(), made_up(3)
    mask = Ragged.packed(torch.zeros_like(batch.response_mask.values), batch.response_mask.lengths)
    assert critic.update(replace(batch, response_mask=mask)) == {"tokens": 0.0}
    bad = Ragged.packed(torch.full_like(batch.returns.values, float("inf")), batch.returns.lengths)
    with pytest.raises(CheckError, match="loss is"):
        critic.update(replace(batch, returns=bad))
    assert critic.version == 0
