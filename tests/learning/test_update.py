"""One update is the same however its rows are cut, ordered and packed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.dataplane.ragged import Ragged
from practicum.errors import CheckError, DataError
from practicum.learning.learner import Learner
from practicum.learning.objective import Objective
from practicum.observe.metrics import METRICS
from practicum.recipe.schema.algorithm_sections import Algorithm, Kl
from practicum.recipe.schema.recipe import Train

from .reference import (
    FAMILIES,
    padded_tokens,
    random_batch,
    reference_update,
    take,
    tiny,
    with_shared_beginnings,
)
from .updates import assert_same, learn

EXACT = 1e-9
"""Tolerance of float64 updates; AdamW divides by gradients' sizes, so weights need a large epsilon."""
TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", weight_decay=0.1, max_grad_norm=0.5)
LOSSES = ("supervised", "ppo_clip", "gspo", "cispo", "dppo", "reinforce")
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
MODELS = {family: tiny(family) for family in FAMILIES}


def algorithm(loss: Any = "ppo_clip", **more: Any) -> Algorithm:
    return Algorithm(loss=loss, advantage="none" if loss == "supervised" else "grpo", **more)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    family=st.sampled_from(FAMILIES),
    loss=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
    budget=st.sampled_from([1, 12, 30, 60, 10**6]),
    temperature=st.sampled_from([1.0, 0.7]),
    entropy=st.sampled_from([0.0, 0.1]),
    place=st.sampled_from(["off", "loss"]),
    old=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_update_equals_the_padded_reference_under_any_cut_and_order(
    seed, family, loss, aggregation, budget, temperature, entropy, place, old, random
):
    batch = with_shared_beginnings(random_batch(seed))
    if not old:
        batch = replace(batch, old_logprobs=None)
    place = "off" if loss == "supervised" else place
    temperature = 1.0 if loss == "supervised" else temperature
    chosen = algorithm(loss, aggregation=aggregation, entropy=entropy, kl=Kl(place=place))
    theirs = reference_update(MODELS[family], batch, TRAIN, chosen, temperature)
    order = list(range(len(batch.sessions)))
    random.shuffle(order)
    mine, _ = learn(MODELS[family], take(batch, order), TRAIN, chosen, temperature=temperature, budget=budget)
    assert_same(mine, theirs, EXACT)


@pytest.mark.parametrize("loss", LOSSES)
def test_float32_update_equals_the_reference_to_1e_4(loss):
    model, batch, chosen = tiny(dtype=torch.float32), random_batch(3), algorithm(loss)
    theirs = reference_update(model, batch, TRAIN, chosen)
    mine, _ = learn(model, batch, TRAIN, chosen, budget=25)
    assert_same(mine, theirs, 1e-4)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_sessions_without_advantage_change_nothing_but_need_no_backward_pass(loss, monkeypatch):
    batch = random_batch(5, groups=4, flat_groups=2)
    skipping, metrics = learn(MODELS["qwen3"], batch, TRAIN, algorithm(loss), budget=40)
    assert 0 < metrics["idle_tokens"] < 1
    monkeypatch.setattr(Objective, "zero_without_advantage", False)
    full, full_metrics = learn(MODELS["qwen3"], batch, TRAIN, algorithm(loss), budget=40)
    assert full_metrics["idle_tokens"] == 0
    assert_same(skipping, full, 1e-12)
    for name in metrics.keys() - {"idle_tokens"}:
        assert metrics[name] == pytest.approx(full_metrics[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("more", [{"entropy": 0.1}, {"kl": Kl(place="loss")}])
def test_sessions_without_advantage_still_learn_from_entropy_and_kl(more):
    batch = random_batch(5, groups=2, flat_groups=2)
    mine, metrics = learn(MODELS["qwen3"], batch, TRAIN, algorithm(**more))
    assert metrics["idle_tokens"] == 0
    assert metrics["grad_norm"] > 1e-3
    assert_same(mine, reference_update(MODELS["qwen3"], batch, TRAIN, algorithm(**more)), EXACT)


def test_a_batch_without_any_advantage_steps_as_with_zero_gradients():
    batch = random_batch(5, groups=2, flat_groups=2)
    mine, metrics = learn(MODELS["qwen3"], batch, TRAIN, algorithm())
    assert metrics["idle_tokens"] == 1
    assert metrics["grad_norm"] == 0
    assert_same(mine, reference_update(MODELS["qwen3"], batch, TRAIN, algorithm()), EXACT)


def test_rows_without_response_tokens_change_nothing():
    batch = random_batch(2)
    empty = [i for i, n in enumerate(batch.response_ids.lengths) if n == 0]
    assert empty
    full = [i for i, n in enumerate(batch.response_ids.lengths) if n]
    mine, _ = learn(MODELS["llama"], batch, TRAIN, algorithm())
    theirs, _ = learn(MODELS["llama"], take(batch, full), TRAIN, algorithm())
    assert_same(mine, theirs, 1e-12)


def test_a_batch_without_sampled_tokens_is_not_applied():
    batch = random_batch(2)
    mask = Ragged.packed(torch.zeros_like(batch.response_mask.values), batch.response_mask.lengths)
    learner = Learner(tiny(), TRAIN, algorithm())
    before = {name: w.clone() for name, w in learner.named_weights()}
    assert learner.update(replace(batch, response_mask=mask)) == {"tokens": 0.0}
    assert learner.version == 0
    assert all(torch.equal(before[name], w) for name, w in learner.named_weights())


def test_supervised_training_is_at_temperature_one():
    batch = random_batch(3)
    cold, _ = learn(MODELS["qwen3"], batch, TRAIN, algorithm("supervised"), temperature=0.3)
    assert_same(cold, reference_update(MODELS["qwen3"], batch, TRAIN, algorithm("supervised")), EXACT)


def test_own_logprobs_as_denominator_make_every_ratio_exactly_one():
    batch = replace(random_batch(7), old_logprobs=None)
    _, metrics = learn(MODELS["qwen3"], batch, TRAIN, algorithm())
    assert metrics["ratio"] == 1.0
    assert metrics["approx_kl"] == metrics["clipped_low"] == metrics["clipped_high"] == 0.0


def test_gap_compares_learner_and_rollout_at_temperature_one_on_sampled_tokens():
    batch, learner = random_batch(9), Learner(tiny(), TRAIN, algorithm(), temperature=0.5)
    plain = padded_tokens(tiny(), batch, temperature=0.5).plain.detach().float()
    shifted = torch.where(batch.response_mask.values, plain + 0.25, torch.tensor(math.nan))
    shifted = Ragged.packed(shifted, batch.response_ids.lengths)
    metrics = learner.update(replace(batch, plain_logprobs=shifted))
    assert metrics["gap_mean"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["gap_max"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["gap_k3"] == pytest.approx(math.exp(-0.25) - 1 + 0.25, abs=1e-6)


def test_gap_of_a_token_that_the_engine_had_wholly_wrong_is_a_number():
    batch, learner = random_batch(9), Learner(tiny(dtype=torch.float32), TRAIN, algorithm())
    wrong = Ragged.packed(
        torch.full_like(batch.response_mask.values, -200, dtype=torch.float32), batch.response_mask.lengths
    )
    metrics = learner.update(replace(batch, plain_logprobs=wrong))
    assert 150 < metrics["gap_mean"] < metrics["gap_max"] < 200
    assert math.exp(metrics["gap_max"]) / 1000 < metrics["gap_k3"] < math.exp(metrics["gap_max"])


def test_metrics_are_documented_and_absent_where_they_mean_nothing():
    batch = random_batch(4)
    _, policy = learn(MODELS["gpt2"], batch, TRAIN, algorithm(kl=Kl(place="loss")))
    assert {f"train/{name}" for name in policy} <= METRICS.keys()
    assert {"kl", "ratio", "entropy", "gap_mean", "policy_loss"} <= policy.keys()
    bare = replace(batch, plain_logprobs=None, ref_logprobs=None, advantages=None, old_logprobs=None)
    _, supervised = learn(MODELS["gpt2"], bare, TRAIN, algorithm("supervised"))
    assert not {"ratio", "kl", "gap_mean", "approx_kl", "clipped_low"} & supervised.keys()
    assert supervised["tokens"] == int(batch.response_mask.values.sum())


def test_equal_beginnings_are_computed_once():
    batch = with_shared_beginnings(random_batch(3))
    learner = Learner(MODELS["qwen3"], TRAIN, algorithm())
    learner.update(batch)
    pairs = zip(batch.prompt_ids.rows, batch.response_ids.rows, batch.response_mask.rows, strict=True)
    rows = [(*prompt.tolist(), *response.tolist())[:-1] for prompt, response, mask in pairs if mask.any()]
    assert learner.row_tokens == sum(map(len, rows))
    assert learner.packed_tokens == len({row[: n + 1] for row in rows for n in range(len(row))})


def test_metrics_do_not_depend_on_the_cut():
    batch = random_batch(6)
    chosen = algorithm("gspo", kl=Kl(place="loss"), entropy=0.01)
    _, whole = learn(MODELS["qwen3"], batch, TRAIN, chosen)
    _, cut = learn(MODELS["qwen3"], batch, TRAIN, chosen, budget=10)
    assert whole.keys() == cut.keys()
    for name in whole:
        assert cut[name] == pytest.approx(whole[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_non_finite_update_leaves_weights_and_optimizer_untouched(what):
    batch = random_batch(3)
    assert batch.advantages is not None
    bad = batch.advantages.values.clone()
    bad[batch.response_mask.values.nonzero()[0]] = math.nan if what == "loss" else 1e30
    messages: list[str] = []
    model = tiny(dtype=torch.float32)
    learner = Learner(model, TRAIN, algorithm("reinforce"), on_nonfinite=messages.append)
    before = {name: w.clone() for name, w in learner.named_weights()}
    learner.update(replace(batch, advantages=Ragged.packed(bad, batch.advantages.lengths)))
    assert "grad_norm" in messages[0]
    assert ("loss" in messages[0]) == (what == "loss")
    assert all(torch.equal(before[name], w) for name, w in learner.named_weights())
    assert not learner.stepper.optimizer.state
    assert learner.version == 0
    strict = Learner(model, TRAIN, algorithm("reinforce"))
    with pytest.raises(CheckError, match="weights are unchanged"):
        strict.update(replace(batch, advantages=Ragged.packed(bad, batch.advantages.lengths)))


def test_a_check_before_the_step_can_refuse_it():
    def refuse(metrics):
        assert {"loss", "grad_norm", "tokens"} <= metrics.keys()
        raise CheckError("no")

    learner = Learner(tiny(), TRAIN, algorithm())
    before = {name: w.clone() for name, w in learner.named_weights()}
    with pytest.raises(CheckError, match="no"):
        learner.update(random_batch(1), before_step=refuse)
    assert all(torch.equal(before[name], w) for name, w in learner.named_weights())
    assert all(p.grad is None for p in learner.model.parameters())
    assert learner.version == 0


def test_version_counts_updates_and_lr_follows_the_training_step():
    train = Train(lr=0.1, steps=11, schedule="linear")
    learner = Learner(tiny(), train, algorithm())
    assert learner.update(random_batch(1))["lr"] == pytest.approx(0.1)
    assert learner.update(random_batch(2), step=6)["lr"] == pytest.approx(0.05)
    assert learner.version == 2


def test_missing_and_uneven_columns_are_named():
    learner, batch = Learner(tiny(), TRAIN, algorithm(kl=Kl(place="loss"))), random_batch(1)
    with pytest.raises(DataError, match="advantages"):
        learner.update(replace(batch, advantages=None))
    with pytest.raises(DataError, match="ref_logprobs"):
        learner.update(replace(batch, ref_logprobs=None))
    assert batch.old_logprobs is not None
    uneven = Ragged.from_rows([*batch.old_logprobs.rows[:-1], torch.zeros(77)])
    with pytest.raises(DataError, match="old_logprobs"):
        learner.update(replace(batch, old_logprobs=uneven))
