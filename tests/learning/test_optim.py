"""Schedules, decay groups and clipping."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from practicum.learning.learner import Learner
from practicum.learning.optimizer import OptimizerStepper, lr_at, make_adamw
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import random_batch, tiny


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    train = Train(lr=1.0, warmup_steps=4, steps=10)
    assert [lr_at(step, train) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_ends_at_final_lr_at_the_last_step_and_stays(schedule):
    train = Train(lr=1.0, final_lr=0.1, warmup_steps=2, steps=12, schedule=schedule)
    rates = [lr_at(step, train) for step in range(1, 16)]
    assert rates[2] == pytest.approx(1.0)
    assert rates[11:] == pytest.approx([0.1] * 4)
    assert all(a > b for a, b in pairwise(rates[2:12]))


def test_decay_acts_on_matrices_only():
    layer = nn.Linear(3, 2)
    optimizer = make_adamw(layer.parameters(), Train(weight_decay=0.3))
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {layer.weight: 0.3, layer.bias: 0.0}


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_gradients_are_clipped_by_their_global_norm(clip):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))]
    seen: list[torch.Tensor] = []

    def keep(metrics):
        seen.extend(p.grad.clone() for p in parameters if p.grad is not None)

    stepper = OptimizerStepper(parameters, Train(max_grad_norm=clip))
    for p in parameters:
        p.grad = torch.ones_like(p)
    metrics = {"loss": 1.0, "tokens": 3.0}
    assert stepper.step(0.1, metrics, keep)
    assert metrics["grad_norm"] == pytest.approx(6**0.5)
    norm = float(torch.cat([g.flatten() for g in seen]).norm())
    assert norm == pytest.approx(0.5 if clip == 0.5 else 6**0.5, rel=1e-5)
    assert all(p.grad is None for p in parameters)


def test_tiny_learning_rates_move_bfloat16_weights():
    """By steps that are too small for bfloat16 one by one, to where a float32 model goes."""
    weights = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(8, 8).bfloat16().to(dtype))
        first = parameter.detach().float().clone()
        stepper = OptimizerStepper([parameter], Train(lr=1e-4, max_grad_norm=None, weight_decay=0.1))
        for _ in range(200):
            parameter.grad = torch.ones_like(parameter)
            assert stepper.step(1e-4, {"loss": 1.0, "tokens": 3.0})
        weights[dtype] = parameter.detach().float()
        assert (weights[dtype] - first).abs().max() > 0.01
    torch.testing.assert_close(weights[torch.bfloat16], weights[torch.float32], rtol=2**-8, atol=1e-6)


def test_a_bfloat16_learner_continues_from_its_master_weights(tmp_path):
    train, batch = Train(lr=1e-5), random_batch(3)
    learner = Learner(tiny(dtype=torch.bfloat16), train, Algorithm())
    learner.update(batch)
    learner.save(tmp_path)
    resumed = Learner(tiny(dtype=torch.bfloat16, seed=1), train, Algorithm())
    resumed.load(tmp_path)
    for one in (learner, resumed):
        for _ in range(3):
            one.update(batch)
    masters = [
        [one.stepper.optimizer.state[p]["master"] for p in one.stepper.parameters]
        for one in (learner, resumed)
    ]
    for mine, theirs, p in zip(*masters, resumed.stepper.parameters, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
        assert torch.equal(p, theirs.bfloat16())
