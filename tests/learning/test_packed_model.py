"""A model that packed attention does not fit is refused; the recipe's ways of running it agree."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from practicum.errors import EngineError
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.load_model import ready
from practicum.recipe.counts import CPU_MICROBATCH_TOKENS
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import FAMILIES, VOCAB, random_batch, tiny
from .updates import assert_same, learn

ALGORITHM = Algorithm(loss="ppo_clip", entropy=0.1)

STEADY = Train(optimizer="tests.learning.optimizers:steady")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_the_same_update_and_recomputes_layers(family):
    model, batch = tiny(family), random_batch(3)
    plain, _ = learn(model, batch, STEADY, ALGORITHM, budget=40)
    again, _ = learn(
        model, batch, STEADY.model_copy(update={"gradient_checkpointing": True}), ALGORITHM, budget=40
    )
    assert_same(again, plain, 1e-12)

    trunk = PackedModel(copy.deepcopy(model), Train(gradient_checkpointing=True))
    layers = [m for m in trunk.model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    calls = []
    for part in (part for layer in layers for part in layer.children()):
        part.register_forward_pre_hook(lambda *_: calls.append(1))
    with trunk.training():
        (packed,) = trunk.microbatches(RowSpans(batch.prompt_ids, batch.response_ids))
        loss = trunk.hidden(packed).sum()
        once = len(calls)
        trunk.backward(loss, packed)
    assert len(calls) > once > 0
    assert not trunk.model.training


def test_autocast_is_close_to_float32_and_keeps_float32_weights():
    model, batch = tiny(dtype=torch.float32), random_batch(3)
    plain, exact = learn(model, batch, STEADY, ALGORITHM)
    mixed, rough = learn(model, batch, STEADY.model_copy(update={"autocast": "bfloat16"}), ALGORITHM)
    assert mixed.loss == pytest.approx(plain.loss, rel=0.05, abs=0.05)
    assert mixed.loss != plain.loss
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.2)
    assert all(weight.dtype == torch.float32 for weight in mixed.weights.values())


def test_bfloat16_models_run():
    batch = random_batch(3)
    found = LogprobScorer(PackedModel(tiny(dtype=torch.bfloat16), Train())).logprobs(
        batch.prompt_ids, batch.response_ids, temperature=1.0
    )
    exact = LogprobScorer(PackedModel(tiny(dtype=torch.float32), Train())).logprobs(
        batch.prompt_ids, batch.response_ids, temperature=1.0
    )
    assert (found.values - exact.values).abs().mean() < 0.3


def test_microbatches_are_at_most_cache_sized_on_a_cpu():
    assert PackedModel(tiny(), Train(microbatch_tokens=10**6)).token_budget == CPU_MICROBATCH_TOKENS
    assert PackedModel(tiny(), Train(microbatch_tokens=77)).token_budget == 77


def test_a_model_whose_attention_does_not_fit_is_refused_by_name():
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(EngineError, match="BloomForCausalLM has layers BloomAttention"):
        ready(BloomForCausalLM(config), torch.device("cpu"))
    with pytest.raises(EngineError, match="practicum can't train BloomForCausalLM"):
        PackedModel(BloomForCausalLM(config), Train())


def test_a_forward_that_differs_is_refused_by_name(monkeypatch):
    model = tiny()

    def blind(self, layer, query, key, value, scale):
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)

    monkeypatch.setattr("practicum.models.packed_attention.PackedLayout.attend", blind)
    with pytest.raises(EngineError, match="Qwen3ForCausalLM: packed rows differ"):
        PackedModel(model, Train())
