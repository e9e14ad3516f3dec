"""Gradients of parts by one backward pass are those of a backward pass for each part."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from practicum.learning import learner as learner_module
from practicum.learning.learner import Learner
from practicum.learning.logprobs import token_logprobs
from practicum.learning.packed_model import PackedModel
from practicum.learning.update_batch import UpdateBatch
from practicum.learning.update_shares import PartGradients, PartShares
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train
from tests.models.families import ATTENTION, MOE, tiny_family

from .distilled import taught, teaching
from .reference import VOCAB, adapted, random_batch, tiny, with_shared_beginnings

APART = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3")
"""Families whose layers all keep parts apart."""
Parts = list[dict[str, torch.Tensor]]


def parts_of(
    model: PreTrainedModel,
    batch: UpdateBatch,
    *,
    at_once: bool,
    budget: int = 10**6,
    algorithm: Algorithm | None = None,
    train: Train | None = None,
    times: int = 1,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Learner, Parts, PartShares, int]:
    """Each part's gradient by name, the shares, and the number of backward passes of the last update."""
    found: list[dict[torch.Tensor, torch.Tensor]] = []
    passes = 0
    with monkeypatch.context() as patch:
        put_sum, backward = PartGradients.put_sum, PackedModel.backward

        def keep(self: PartGradients) -> None:
            apart = self._apart
            found[:] = [{p: grads[i] for p, grads in apart.stacks.items()} for i in range(apart.count)]
            found.extend(dict(grads) for grads in self._taken)
            put_sum(self)

        def count(self: PackedModel, *args: Any) -> None:
            nonlocal passes
            passes += 1
            backward(self, *args)

        patch.setattr(PartGradients, "put_sum", keep)
        patch.setattr(PackedModel, "backward", count)
        how = teaching("reverse_kl", "full") if batch.teachers is not None else None
        train = train or Train(lr=0.01, weight_decay=0.1, max_grad_norm=0.5)
        learner = Learner(copy.deepcopy(model), train, algorithm or Algorithm(), teaching=how)
        learner.trunk.token_budget = budget
        learner._keeps_parts = at_once
        for _ in range(times):
            passes = 0
            learner.update(batch, groups=(0, 1))
    names: dict[torch.Tensor, str] = {p: name for name, p in learner.model.named_parameters()}
    assert learner.shares is not None
    return learner, [{names[p]: grad for p, grad in grads.items()} for grads in found], learner.shares, passes


def assert_parts(mine: Parts, theirs: Parts, tolerance: float) -> None:
    largest = max(float(grad.abs().max()) for part in theirs for grad in part.values())
    for part, other in zip(mine, theirs, strict=True):
        for name in (
            part.keys() | other.keys()
        ):  # a layer may have no gradient in one way, and zeros in the other
            grads = [grads.get(name) for grads in (part, other)]
            full = next(grad for grad in grads if grad is not None)
            a, b = (torch.zeros_like(full) if grad is None else grad for grad in grads)
            assert float((a - b).abs().max()) <= tolerance * largest, name


def compare(model: PreTrainedModel, batch: UpdateBatch, tolerance: float, patch: Any, **more: Any) -> None:
    """Compare with passes for each part, and require that only one was made."""
    mine, parts, shares, passes = parts_of(model, batch, at_once=True, monkeypatch=patch, **more)
    theirs, others, expected, more_passes = parts_of(model, batch, at_once=False, monkeypatch=patch, **more)
    assert mine._keeps_parts
    assert passes < more_passes or "budget" in more
    assert_parts(parts, others, tolerance)
    assert shares.shares == pytest.approx(expected.shares, abs=100 * tolerance)
    assert sum(shares.shares) + sum(shares.rest.values()) == pytest.approx(1.0, abs=1e-6)
    for (name, weight), (_, other) in zip(mine.named_weights(), theirs.named_weights(), strict=True):
        torch.testing.assert_close(weight, other, rtol=100 * tolerance, atol=100 * tolerance, msg=name)


def two_teachers(seed: int, groups: int = 4) -> UpdateBatch:
    """Rows of two teachers, some of which begin alike."""
    return taught(with_shared_beginnings(random_batch(seed, groups=groups)))


@pytest.mark.parametrize("budget", [14, 60, 10**6])
@pytest.mark.parametrize("recompute", [False, True])
def test_parts_are_those_of_passes_under_any_cut(budget, recompute, monkeypatch):
    train = Train(lr=0.01, weight_decay=0.1, gradient_checkpointing=recompute)
    compare(tiny(), two_teachers(3), 1e-11, monkeypatch, budget=budget, train=train)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_parts_are_those_of_passes_with_rewards(loss, monkeypatch):
    batch = random_batch(5, groups=4, flat_groups=1)
    batch = taught(batch)
    compare(tiny(), batch, 1e-11, monkeypatch, algorithm=Algorithm(loss=loss, entropy=0.01), budget=40)


def falls_back(model: PreTrainedModel, batch: UpdateBatch, tolerance: float, patch: Any, **more: Any) -> None:
    """Compare with passes for each part, of which there are as many from the second update on."""
    mine, parts, shares, passes = parts_of(model, batch, at_once=True, times=2, monkeypatch=patch, **more)
    _, others, expected, more_passes = parts_of(
        model, batch, at_once=False, times=2, monkeypatch=patch, **more
    )
    assert not mine._keeps_parts
    assert passes == more_passes
    assert_parts(parts, others, tolerance)
    assert shares.shares == pytest.approx(expected.shares, abs=100 * tolerance)


def test_chunks_of_logits_take_passes(monkeypatch):
    def chunked(*args: Any, **options: Any) -> Any:
        return token_logprobs(*args, **options, chunk_logits=16 * VOCAB)

    monkeypatch.setattr(learner_module, "token_logprobs", chunked)
    falls_back(tiny(), two_teachers(4), 1e-11, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adapters_and_16_bit_weights_take_passes(dtype, monkeypatch):
    model = adapted() if dtype == torch.float64 else tiny("qwen3", dtype)
    falls_back(model, two_teachers(5), 1e-11, monkeypatch)


@pytest.mark.parametrize("family", [*ATTENTION, *MOE, "qwen3_next", "lfm2", "mamba2", "falcon_h1"])
def test_any_family_has_the_parts_of_passes(family, monkeypatch):
    batch = replace(two_teachers(6), teachers=None)  # of another vocabulary
    more: Any = {"algorithm": Algorithm(loss="ppo_clip", entropy=0.1), "monkeypatch": monkeypatch}
    model = tiny_family(family)
    mine, parts, _, passes = parts_of(model, batch, at_once=True, **more)
    _, others, _, expected = parts_of(model, batch, at_once=False, **more)
    assert_parts(parts, others, 1e-4)
    assert mine._keeps_parts == (passes < expected)
    assert mine._keeps_parts or family not in APART
