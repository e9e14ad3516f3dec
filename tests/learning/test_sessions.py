"""A session counts once: cut into trajectories, or over mini-batches, it gives the same gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from practicum.dataplane.ragged import Ragged
from practicum.learning.update_batch import UpdateBatch
from practicum.recipe.schema.algorithm_sections import Algorithm, Kl
from practicum.recipe.schema.recipe import Train

from .reference import VOCAB, take, tiny
from .updates import assert_same, learn

TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", max_grad_norm=None)
LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce")
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
MODEL = tiny()
COLUMNS = ("response_mask", "advantages", "old_logprobs", "ref_logprobs")


def turns_batch(seed: int, split: bool) -> UpdateBatch:
    """Sessions of one to three turns with tools' tokens between; each one row, or one row for each turn."""
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> Tensor:
        length = int(torch.randint(low, high + 1, (), generator=g))
        return torch.randint(0, VOCAB, (length,), generator=g)

    rows: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "response_ids", *COLUMNS, "sessions")}
    prompts = [ids(1, 6), ids(1, 6)]
    for session in range(5):
        prompt = prompts[session % 2]
        for _ in range(int(torch.randint(1, 4, (), generator=g))):
            sampled, tool = ids(1, 5), ids(0, 3)
            response = torch.cat([sampled, tool])
            mask = torch.arange(len(response)) < len(sampled)
            numbers = torch.randn(3, len(response), generator=g, dtype=torch.float64)
            columns = dict(zip(COLUMNS, (mask, numbers[0], *(numbers[1:].abs() * -2)), strict=True))
            columns |= {"response_ids": response}
            if not split and rows["sessions"] and rows["sessions"][-1] == session:
                for name, column in columns.items():
                    rows[name][-1] = torch.cat([rows[name][-1], column])
            else:
                for name, column in {**columns, "prompt_ids": prompt, "sessions": session}.items():
                    rows[name].append(column)
            prompt = torch.cat([prompt, response])
    ragged: dict[str, Any] = {name: Ragged.from_rows(r) for name, r in rows.items() if name != "sessions"}
    return UpdateBatch(**ragged, sessions=rows["sessions"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_session_split_at_turns_gives_the_same_loss_and_gradient(loss, aggregation):
    algorithm = Algorithm(loss=loss, aggregation=aggregation, entropy=0.01, kl=Kl(place="loss"))
    for seed in range(3):
        whole, parts = turns_batch(seed, split=False), turns_batch(seed, split=True)
        assert len(parts.sessions) > len(whole.sessions)
        theirs, _ = learn(MODEL, whole, TRAIN, algorithm)
        mine, _ = learn(MODEL, parts, TRAIN, algorithm, budget=30)
        assert_same(mine, theirs, 1e-9)


def test_split_sessions_of_an_moe_model_give_the_same_gradient():
    # Routers work in single precision, whatever the model's.
    algorithm, model = Algorithm(loss="ppo_clip"), tiny("qwen3_moe")
    theirs, _ = learn(model, turns_batch(1, split=False), TRAIN, algorithm)
    mine, _ = learn(model, turns_batch(1, split=True), TRAIN, algorithm, budget=30)
    assert_same(mine, theirs, 1e-6)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from(["ppo_clip", "cispo", "reinforce"]),
    aggregation=st.sampled_from(AGGREGATIONS),
    data=st.data(),
)
def test_gradients_of_minibatches_that_cut_sessions_add_up(seed, loss, aggregation, data):
    batch, algorithm = turns_batch(seed, split=True), Algorithm(loss=loss, aggregation=aggregation)
    rows = len(batch.sessions)
    sampled = [int(mask.sum()) for mask in batch.response_mask.rows]
    whole = [
        sum(n for n, s in zip(sampled, batch.sessions, strict=True) if s == mine) for mine in batch.sessions
    ]
    batch = replace(batch, session_tokens=whole)
    part = data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))

    def count(chosen: list[int]) -> float:
        if aggregation == "token_mean":
            return sum(sampled[i] for i in chosen)
        return sum(sampled[i] / whole[i] for i in chosen)

    theirs, _ = learn(MODEL, batch, TRAIN, algorithm)
    sums = {name: torch.zeros_like(grad) for name, grad in theirs.grads.items()}
    loss_sum = 0.0
    for number in (0, 1):
        chosen = [i for i in range(rows) if part[i] == number]
        if chosen:
            mine, _ = learn(MODEL, take(batch, chosen), TRAIN, algorithm, budget=30)
            loss_sum += count(chosen) * mine.loss
            for name, grad in mine.grads.items():
                sums[name] += count(chosen) * grad
    everything = count(list(range(rows)))
    assert loss_sum == pytest.approx(everything * theirs.loss, rel=1e-9, abs=1e-12)
    for name, grad in theirs.grads.items():
        torch.testing.assert_close(sums[name], everything * grad, rtol=1e-9, atol=1e-9, msg=name)
