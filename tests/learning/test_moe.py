"""Mixture-of-experts models: recorded experts are replayed, gradients reach routers, loads are counted."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Counter
from practicum.errors import DataError
from practicum.learning.learner import Learner
from practicum.learning.packing import RowExtras, RowSpans
from practicum.learning.update_batch import RouterLoad, UpdateBatch
from practicum.learning.value_learner import ValueLearner
from practicum.models.experts import routes_of
from practicum.observe.metrics import METRICS
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train
from tests.engines.engines import engine_of, generate, sampling

from .reference import random_batch, reference_update, take, tiny, with_shared_beginnings
from .updates import assert_same, learn

TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", max_grad_norm=None)
ALGORITHM = Algorithm(loss="ppo_clip", entropy=0.1)
EXACT = tiny("qwen3_moe")
MODEL = tiny("qwen3_moe", torch.float32)
LAYERS, EXPERTS, EACH = 2, 6, 2


def sequences(batch: UpdateBatch) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(batch.prompt_ids.rows, batch.response_ids.rows, strict=True)]


@torch.no_grad()
def own_experts(model: PreTrainedModel, batch: UpdateBatch) -> Ragged:
    """What the model itself takes in a plain forward of each row."""
    routes = routes_of(model)
    assert routes is not None
    rows = []
    for ids in sequences(batch):
        with routes.record() as taken:
            model(input_ids=ids[None])
        rows.append(taken.tensor())
        rows[-1][-1] = 0
    return Ragged.from_rows(rows)


def other_experts(batch: UpdateBatch, seed: int = 0) -> Ragged:
    """Experts made up for each token; alike for equal prompts, so that these are shared."""
    rows = []
    for ids, prompt in zip(sequences(batch), batch.prompt_ids.rows, strict=True):
        of_prompt = torch.Generator().manual_seed(seed + int((prompt + 1).prod()) % 1000)
        of_row = torch.Generator().manual_seed(seed + 1 + len(rows))
        parts = [(len(prompt), of_prompt), (len(ids) - len(prompt), of_row)]
        chosen = [torch.rand(n, LAYERS, EXPERTS, generator=g).topk(EACH).indices for n, g in parts]
        rows.append(torch.cat(chosen))
    return Ragged.from_rows(rows)


@torch.no_grad()
def slow_logprobs(model: PreTrainedModel, batch: UpdateBatch, experts: Ragged | None) -> Tensor:
    """One row at a time by the model's own forward, with these experts."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    routes = routes_of(model)
    assert routes is not None
    found = []
    for i, ids in enumerate(sequences(batch)):
        if experts is None:
            logits = model(input_ids=ids[None]).logits[0]
        else:
            with routes.replay(experts[i]):
                logits = model(input_ids=ids[None]).logits[0]
        start = len(batch.prompt_ids[i])
        logprobs = logits.log_softmax(-1)[start - 1 : -1]
        found.append(logprobs.gather(1, ids[start:, None])[:, 0])
    return torch.cat(found).float()


def logprobs(learner: Learner, batch: UpdateBatch, experts: Ragged | None = None) -> Tensor:
    extras = None if experts is None else RowExtras(routed_experts=experts)
    found = learner.scorer.logprobs(batch.prompt_ids, batch.response_ids, temperature=1.0, extras=extras)
    return found.values


def replaying(batch: UpdateBatch, experts: Ragged) -> UpdateBatch:
    return replace(batch, extras=RowExtras(routed_experts=experts))


@pytest.mark.parametrize("loss", ["supervised", "ppo_clip", "gspo"])
def test_an_update_by_own_routing_equals_the_padded_reference(loss):
    algorithm = Algorithm(loss=loss, advantage="none" if loss == "supervised" else "grpo")
    batch = with_shared_beginnings(random_batch(3))
    theirs = reference_update(EXACT, batch, TRAIN, algorithm)
    mine, _ = learn(EXACT, batch, TRAIN, algorithm, budget=40)
    # Routers weigh in single precision, and a shared prompt's gradients meet before them.
    assert_same(mine, theirs, 1e-6)


@pytest.mark.parametrize("budget", [10, 60, 2048])
def test_replayed_experts_give_the_logprobs_of_the_forward_that_took_them(budget):
    batch = with_shared_beginnings(random_batch(4))
    learner = Learner(copy.deepcopy(MODEL), TRAIN, ALGORITHM)
    learner.trunk.token_budget = budget
    own = own_experts(learner.model, batch)
    torch.testing.assert_close(
        logprobs(learner, batch, own), slow_logprobs(MODEL, batch, None), rtol=0, atol=1e-5
    )
    others = other_experts(batch)
    theirs = slow_logprobs(MODEL, batch, others)
    torch.testing.assert_close(logprobs(learner, batch, others), theirs, rtol=0, atol=1e-5)
    assert (logprobs(learner, batch) - theirs).abs().max() > 0.1


def test_replaying_what_the_engine_recorded_gives_the_engine_s_logprobs():
    prompts = [[3, 4, 5, 6], [3, 4, 5, 6], [7, 8], [9, 10, 11]]
    with engine_of(copy.deepcopy(MODEL), context=64) as engine:
        requests = [(prompt, sampling(12), Counter(0, i)) for i, prompt in enumerate(prompts)]
        answers = generate(engine, requests)
    rows = []
    for answer in answers:
        assert answer.experts is not None
        rows.append(torch.cat([answer.experts, torch.zeros_like(answer.experts[:1])]))
    batch = replace(
        random_batch(0),
        prompt_ids=Ragged.from_rows([torch.tensor(prompt) for prompt in prompts]),
        response_ids=Ragged.from_rows([answer.tokens for answer in answers]),
    )
    theirs = torch.cat([answer.plain_logprobs for answer in answers])
    learner = Learner(copy.deepcopy(MODEL), TRAIN, ALGORITHM)
    mine = logprobs(learner, batch, Ragged.from_rows(rows))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    others = logprobs(learner, batch, other_experts(batch))
    assert (others - theirs).abs().max() > 0.1


def test_without_replay_a_learner_with_other_weights_takes_other_experts():
    batch, engine = random_batch(4), copy.deepcopy(EXACT)
    recorded = own_experts(engine, batch)
    learner = Learner(copy.deepcopy(EXACT), TRAIN, ALGORITHM)
    with torch.no_grad():
        for name, weight in learner.model.named_parameters():
            if name.endswith("gate.weight"):
                weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    metrics = learner.update(replaying(batch, recorded))
    assert 0 < metrics["router_moved"] < 0.5


@pytest.mark.parametrize("train", [TRAIN, TRAIN.model_copy(update={"gradient_checkpointing": True})])
def test_gradients_under_replay_are_those_of_the_replayed_forward(train):
    batch = random_batch(3)
    others = other_experts(batch)
    mine, metrics = learn(EXACT, replaying(batch, others), train, ALGORITHM, budget=40)
    routers = {name: grad for name, grad in mine.grads.items() if name.endswith("gate.weight")}
    assert len(routers) == LAYERS
    assert all(grad.abs().max() > 1e-6 for grad in routers.values())
    assert metrics["router_moved"] > 0.5

    # The same by rows that share nothing, one micro-batch each.
    alone, _ = learn(EXACT, replaying(batch, others), TRAIN, ALGORITHM, budget=1)
    assert_same(mine, alone, 1e-6)
    free, _ = learn(EXACT, batch, TRAIN, ALGORITHM, budget=40)
    assert any((free.grads[name] - grad).abs().max() > 1e-3 for name, grad in routers.items())


def test_sessions_without_advantage_replay_too():
    batch = random_batch(5, groups=2, flat_groups=2)
    learner = Learner(copy.deepcopy(EXACT), TRAIN, Algorithm(loss="reinforce"))
    others = other_experts(batch)
    plain = Ragged.packed(slow_logprobs(EXACT, batch, others), batch.response_ids.lengths)
    metrics = learner.update(replace(replaying(batch, others), plain_logprobs=plain))
    assert metrics["idle_tokens"] == 1
    assert metrics["gap_max"] < 1e-5


def test_rows_share_tokens_only_if_their_recorded_experts_are_equal():
    ids = Ragged.from_rows([torch.tensor([1, 2, 3])] * 3)
    answers = Ragged.from_rows([torch.tensor([4, 5])] * 3)
    experts = torch.arange(3 * 5 * 4).view(3, 5, 2, 2) % EXPERTS
    experts[1, :3] = experts[0, :3]
    rows = RowSpans(ids, answers, RowExtras(routed_experts=Ragged.from_rows(list(experts))))
    packed, tree = rows.pack([0, 1, 2]), rows.tokens.tree([0, 1, 2])
    assert packed.experts_N is not None
    assert len(packed.ids_N) == 3 + 3 + 1 + 1 + 1
    for i, path_N in tree.paths.items():
        path = torch.from_numpy(path_N)
        assert packed.ids_N[path].tolist() == [1, 2, 3, 4]
        assert torch.equal(packed.experts_N[path], experts[i, :4])


def test_the_critic_routes_by_itself():
    batch = random_batch(3)
    extras = RowExtras(routed_experts=other_experts(batch))
    critic = ValueLearner(MODEL, TRAIN, CriticRecipe())
    with torch.no_grad():
        critic.head.weight.fill_(0.5)
    ids = batch.prompt_ids, batch.response_ids
    assert torch.equal(critic.values(*ids, extras=extras).values, critic.values(*ids).values)


def test_loads_by_hand():
    load = RouterLoad(experts=4)
    assert load.result() == {}
    load.add(torch.tensor([[[0, 1], [2, 3]], [[0, 2], [2, 1]]]), moved=0.25)
    load.add(torch.tensor([[[0, 1], [2, 3]]]), moved=1.0)
    # Layer 0: experts 0 three times, 1 twice, 2 once; layer 1: 2 three times, 3 twice, 1 once.
    assert load.result() == {
        "router_load_max": 3 / 6 * 4,
        "router_unused": 2 / 8,
        "router_moved": pytest.approx((2 * 0.25 + 1.0) / 3),
    }


def test_loads_are_of_the_input_tokens_and_moves_only_of_replayed_ones():
    batch = take(random_batch(3), [0])
    _, free = learn(MODEL, batch, TRAIN, ALGORITHM)
    assert {f"train/{name}" for name in free} <= METRICS.keys()
    assert "router_moved" not in free
    own = own_experts(copy.deepcopy(MODEL), batch)
    _, metrics = learn(MODEL, replaying(batch, own), TRAIN, ALGORITHM)
    assert metrics["router_moved"] == 0
    load = RouterLoad(EXPERTS)
    load.add(own[0][:-1])
    assert load.result().items() <= free.items()
    assert load.result().items() <= metrics.items()


def test_dense_models_have_no_routers_to_report_or_replay():
    batch = random_batch(3)
    _, metrics = learn(tiny(), batch, TRAIN, ALGORITHM)
    assert not any(name.startswith("router") for name in metrics)
    with pytest.raises(DataError, match="Qwen3ForCausalLM has no routers"):
        learn(tiny(), replaying(batch, other_experts(batch)), TRAIN, ALGORITHM)


def test_experts_of_other_lengths_are_named():
    batch = random_batch(3)
    experts = other_experts(batch)
    short = Ragged.from_rows([*experts.rows[:-1], experts[len(experts) - 1][:-1]])
    with pytest.raises(DataError, match="routed_experts"):
        learn(MODEL, replaying(batch, short), TRAIN, ALGORITHM)
