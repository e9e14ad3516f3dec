"""Experts of mixture-of-experts models: recorded, replayed, counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.errors import EngineError
from practicum.models.experts import Routes, routes_of
from tests.engines.engines import tiny

IDS = torch.tensor([[5, 9, 14, 3, 30, 41, 8, 22]])
EXPERTS, PER_TOKEN, LAYERS = 8, 2, 2


def moe() -> tuple[PreTrainedModel, Routes]:
    model = tiny("qwen3_moe")
    routes = routes_of(model)
    assert routes is not None
    return model, routes


def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS, use_cache=False).logits[0]


def record(model: PreTrainedModel, routes: Routes) -> tuple[Tensor, Tensor]:
    """Logits and experts of a plain forward."""
    with torch.no_grad(), routes.record() as taken:
        return logits(model), taken.tensor()


def others(experts_NLE: Tensor) -> Tensor:
    """A set of experts without any of those given, for each token and layer."""
    return (experts_NLE.amax(-1, keepdim=True) + torch.arange(1, 1 + PER_TOKEN)) % EXPERTS


def test_a_dense_model_has_no_routes():
    assert all(routes_of(tiny(family)) is None for family in ("qwen3", "llama", "gpt2", "qwen2_5_vl"))


def test_what_is_recorded_are_the_best_of_the_routers_logits():
    model, routes = moe()
    _, experts_NLE = record(model, routes)
    with torch.no_grad():
        scored = model(IDS, use_cache=False, output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(PER_TOKEN).indices for layer in scored], 1)
    assert experts_NLE.dtype == torch.int64
    assert torch.equal(experts_NLE, expected)


def test_calls_are_recorded_one_behind_the_other_and_only_inside():
    model, routes = moe()
    again = routes_of(model)
    assert again is not None
    with torch.no_grad():
        _, once = record(model, again)
        with routes.record() as taken:
            logits(model)
            logits(model)
        logits(model)
    assert torch.equal(taken.tensor(), torch.cat([once, once]))


def test_replaying_what_was_recorded_gives_the_same_logits():
    model, routes = moe()
    expected, experts_NLE = record(model, routes)
    with torch.no_grad(), routes.replay(experts_NLE) as moved:
        got = logits(model)
    assert torch.equal(got, expected)
    assert moved.share() == 0.0


def test_replaying_other_experts_changes_logits_until_the_end_of_the_replay():
    model, routes = moe()
    expected, experts_NLE = record(model, routes)
    with torch.no_grad():
        with routes.replay(others(experts_NLE)) as moved:
            assert not torch.allclose(logits(model), expected, atol=1e-2)
        assert torch.equal(logits(model), expected)
    # In the second layer the hidden states are others already, and so may be the router's own choice.
    assert moved.share() >= 0.5


def test_tokens_without_experts_to_replay_take_their_own():
    model, routes = moe()
    expected, experts_NLE = record(model, routes)
    given_NLE = torch.full_like(experts_NLE, -1)
    with torch.no_grad():
        with routes.replay(given_NLE) as moved:
            assert torch.allclose(logits(model), expected, atol=1e-6)
        assert moved.share() == 0
        given_NLE[-1] = others(experts_NLE)[-1]
        with routes.replay(given_NLE), routes.record() as taken:
            got = logits(model)
    assert torch.equal(taken.tensor()[-1], given_NLE[-1])
    assert torch.equal(taken.tensor()[:-1], experts_NLE[:-1])
    changed_N = (got - expected).abs().flatten(0, -2).amax(-1) > 1e-3
    assert changed_N.nonzero().flatten().tolist() == [len(changed_N) - 1]


def test_the_share_counts_tokens_and_layers():
    model, routes = moe()
    _, experts_NLE = record(model, routes)
    # The last token is changed in the last layer only, so that nothing behind it changes.
    experts_NLE[-1, -1] = others(experts_NLE)[-1, -1]
    with torch.no_grad(), routes.replay(experts_NLE) as moved:
        logits(model)
    assert moved.share() == 1 / (IDS.shape[1] * LAYERS)


@pytest.mark.parametrize("norm", [True, False])
def test_weights_are_the_routers_probabilities_of_the_replayed_experts(norm: bool):
    model = tiny("qwen3_moe")
    block: Any = model.base_model.layers[0].mlp  # pyright: ignore
    for layer in model.base_model.layers:  # pyright: ignore
        layer.mlp.gate.norm_topk_prob = norm  # pyright: ignore
    routes = routes_of(model)
    assert routes is not None
    hidden_N = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    chosen_NE = torch.tensor([[1, 6], [0, 3], [7, 2]])
    with torch.no_grad():
        with routes.replay(chosen_NE.unsqueeze(1).expand(-1, LAYERS, -1)):
            _, weights_NE, indices_NE = block.gate(hidden_N)
        chances_NE = (hidden_N @ block.gate.weight.t()).softmax(-1).gather(1, chosen_NE)
    expected = chances_NE / chances_NE.sum(-1, keepdim=True) if norm else chances_NE
    assert torch.equal(indices_NE, chosen_NE)
    assert torch.allclose(weights_NE, expected)


def test_gradients_of_replayed_experts_reach_the_routers_and_survive_recomputation():
    model, routes = moe()
    _, experts_NLE = record(model, routes)
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train(recompute)
        model.zero_grad()
        with routes.replay(others(experts_NLE)):
            logits(model).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6), name
    assert all(float(g.abs().sum()) > 0 for name, g in gradients[0].items() if "mlp.gate" in name)


def test_a_copy_of_a_model_has_routes_of_its_own():
    model, routes = moe()
    expected, experts_NLE = record(model, routes)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in copied.base_model.layers:  # pyright: ignore
            layer.mlp.gate.weight.neg_()  # pyright: ignore
        with routes.replay(others(experts_NLE)):
            mine = logits(copied)
        assert torch.equal(mine, logits(copied))
        with routes.record() as taken:
            assert not torch.allclose(logits(copied), expected, atol=1e-2)
            logits(model)
    assert torch.equal(taken.tensor(), experts_NLE)


def test_experts_of_another_shape_are_an_error():
    model, routes = moe()
    with (
        pytest.raises(EngineError, match="expected tokens x 2 layers x 2 experts"),
        routes.replay(torch.zeros(8, 3, 2, dtype=torch.int64)),
    ):
        pass
    too_few = torch.zeros(4, LAYERS, PER_TOKEN, dtype=torch.int64)
    with pytest.raises(EngineError, match="4 tokens are replayed in a forward of 8"), routes.replay(too_few):
        logits(model)
    assert torch.equal(logits(model), logits(model))


class _Router(nn.Module):
    """Weights are the scores of the chosen experts, squared if so asked, and a factor."""

    def __init__(self, *, squared: bool = False, sigmoid: bool = False, reverse: bool = False) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.factor = 2, 4, 2.5
        self.squared, self.sigmoid, self.reverse = squared, sigmoid, reverse
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(3)))
        self.correction = nn.Buffer(torch.tensor([9.0, 0.0, 9.0, 0.0]))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = hidden @ self.weight.t()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        indices = (scores + self.correction).topk(2).indices
        weights = scores.gather(-1, indices) ** (2 if self.squared else 1) * self.factor
        return (indices, weights, logits) if self.reverse else (logits, weights, indices)


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_a_correction_bias_and_a_factor_are_replayed_correctly(sigmoid: bool, reverse: bool):
    router = _Router(sigmoid=sigmoid, reverse=reverse)
    routes = routes_of(nn.Sequential(router))
    assert routes is not None
    hidden_N = 4 * torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    replayed_NE = torch.tensor([[1, 3]] * 5)  # the bias keeps these from being chosen
    with routes.replay(replayed_NE.unsqueeze(1)) as moved:
        parts = router(hidden_N)
    logits, weights, indices = reversed(parts) if reverse else parts
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    assert torch.equal(indices, replayed_NE)
    assert moved.share() == 1.0
    torch.testing.assert_close(weights, 2.5 * scores.gather(1, replayed_NE))


def test_a_model_whose_routers_have_another_rule_has_no_routes():
    assert routes_of(nn.Sequential(_Router(squared=True))) is None
