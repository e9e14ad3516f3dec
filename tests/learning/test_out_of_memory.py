"""An update that runs out of memory is done again with smaller micro-batches, and comes to the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from practicum.errors import PracticumError
from practicum.learning.learner import Learner
from practicum.learning.packed_model import PackedModel
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import random_batch, tiny
from .updates import assert_same, learn

ALGORITHM = Algorithm(loss="ppo_clip", entropy=0.1)
TRAIN = Train(optimizer="tests.learning.optimizers:steady")


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch):
    """A device with room for so many tokens: more fail in the backward pass, after gradients were added."""
    backward = PackedModel.backward

    def limit(tokens: int, message: str | None = None) -> None:
        def failing(self, loss, packed):
            backward(self, loss, packed)
            if len(packed.ids_N) > tokens:
                raise RuntimeError(message) if message else torch.OutOfMemoryError("no memory left")

        monkeypatch.setattr(PackedModel, "backward", failing)

    return limit


@pytest.mark.parametrize("message", [None, "DefaultCPUAllocator: can't allocate memory: you tried"])
def test_the_update_is_the_same_and_the_size_is_remembered(limited, message, tmp_path: Path):
    model, batch = tiny(), random_batch(3)
    plain, whole = learn(model, batch, TRAIN, ALGORITHM, budget=10_000)
    assert "microbatch_halved" not in whole
    limited(60, message)
    again, metrics = learn(model, batch, TRAIN, ALGORITHM, budget=10_000)
    assert metrics["microbatch_halved"] >= 1
    assert_same(again, plain, 1e-12)
    for name in ("loss", "tokens", "entropy", "grad_norm", "ratio"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-9)

    learner = Learner(model, TRAIN, ALGORITHM)
    learner.update(batch)
    assert learner.trunk.token_budget < 100
    assert "microbatch_halved" not in learner.update(batch)
    learner.save(tmp_path)
    resumed = Learner(tiny(seed=1), TRAIN, ALGORITHM)
    resumed.load(tmp_path)
    assert resumed.trunk.token_budget == learner.trunk.token_budget


def test_one_row_that_is_too_long_is_an_error_with_the_keys_to_change(limited):
    learner = Learner(tiny(), TRAIN, ALGORITHM)
    limited(3)
    with pytest.raises(
        PracticumError, match=r"(?s)a single row, which can't be split.*train\.gradient_checkpointing"
    ):
        learner.update(random_batch(3))
    assert learner.version == 0


def test_other_errors_are_passed_on(limited):
    learner = Learner(tiny(), TRAIN, ALGORITHM)
    limited(3, "shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        learner.update(random_batch(3))
