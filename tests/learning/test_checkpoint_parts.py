"""A run that was saved and loaded goes on bit by bit; an export is a plain HuggingFace model."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from practicum.errors import PracticumError
from practicum.learning.learner import Learner
from practicum.learning.update_batch import CriticBatch
from practicum.learning.value_learner import ValueLearner
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Train

from .reference import FAMILIES, random_batch, tiny

TRAIN = Train(lr=0.01, weight_decay=0.1, schedule="cosine", steps=6)


def learner(family="qwen3", seed=0):
    return Learner(tiny(family, torch.float32, seed), TRAIN, Algorithm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_learner_equals_one_that_never_stopped(family, tmp_path):
    one = learner(family)
    for step in range(4):
        one.update(random_batch(step), step=step + 1)
        if step == 1:
            one.save(tmp_path / "part")
    other = learner(family, seed=1)
    shared = {name: w.data_ptr() for name, w in other.named_weights()}
    other.load(tmp_path / "part")
    assert other.version == 2
    for step in range(2, 4):
        other.update(random_batch(step), step=step + 1)
    theirs = dict(one.named_weights())
    for name, weight in other.named_weights():
        assert torch.equal(weight, theirs[name]), name
        assert weight.data_ptr() == shared[name]
    assert torch.equal(one.fingerprint(), other.fingerprint())


def test_a_learner_saved_before_its_first_update_starts_as_a_fresh_one(tmp_path):
    learner().save(tmp_path)
    other = learner(seed=1)
    other.update(random_batch(5))
    other.load(tmp_path)
    fresh = learner()
    assert other.version == 0
    assert fresh.update(random_batch(0)) == other.update(random_batch(0))
    theirs = dict(fresh.named_weights())
    assert all(torch.equal(weight, theirs[name]) for name, weight in other.named_weights())


def test_a_resumed_critic_equals_one_that_never_stopped(tmp_path):
    def batch(seed):
        b = random_batch(seed)
        assert b.advantages is not None
        assert b.old_logprobs is not None
        return CriticBatch(b.prompt_ids, b.response_ids, b.response_mask, b.old_logprobs, b.advantages)

    one = ValueLearner(tiny(dtype=torch.float32), TRAIN, CriticRecipe())
    one.update(batch(0))
    one.save(tmp_path)
    other = ValueLearner(tiny(dtype=torch.float32, seed=1), TRAIN, CriticRecipe())
    other.load(tmp_path)
    assert one.update(batch(1)) == other.update(batch(1))
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_incomplete_checkpoint_and_another_model_are_named(tmp_path):
    one = learner()
    one.save(tmp_path)
    with pytest.raises(PracticumError, match="a different model"):
        learner("gpt2").load(tmp_path)
    for file in ("__0_0.distcp", ".metadata"):
        (tmp_path / file).unlink()
        with pytest.raises(PracticumError, match=f"incomplete: {re.escape(file)} is missing"):
            one.load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export_without_practicum_in_it(family, tmp_path):
    one = learner(family)
    one.update(random_batch(0))
    one.export(tmp_path, make_tokenizer())
    assert "practicum" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == one.model.config.vocab_size
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<eos>"
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(model(ids).logits, one.model(ids).logits, rtol=1e-4, atol=1e-4)
    assert one.model.config._attn_implementation == "practicum"


def test_named_weights_are_the_weights_themselves_tied_ones_once():
    one = learner("qwen3")
    names = [name for name, _ in one.named_weights()]
    assert "lm_head.weight" not in names
    pointers = {p.data_ptr() for p in one.model.parameters()}
    assert {weight.data_ptr() for _, weight in one.named_weights()} == pointers
    assert not any(weight.requires_grad for _, weight in one.named_weights())
