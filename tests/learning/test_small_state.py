"""Optimizers whose state is small, or elsewhere between updates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from practicum.errors import MissingExtraError, RecipeError
from practicum.learning.learner import Learner
from practicum.learning.optimizer import OptimizerStepper
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import adapted, random_batch, tiny

EIGHT = Train(lr=1e-3, optimizer="adamw_8bit", weight_decay=0.1)
PLAIN = Train(lr=1e-3, weight_decay=0.1)


def trained(train: Train, dtype: torch.dtype = torch.float32, steps: int = 40) -> OptimizerStepper:
    """A matrix and a vector after steps by gradients that are drawn."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(256, 96).to(dtype)), nn.Parameter(torch.randn(5).to(dtype))]
    stepper = OptimizerStepper(parameters, train)
    for _ in range(steps):
        for p in parameters:
            p.grad = (torch.randn(p.shape) + 0.5).to(dtype)
        assert stepper.step(train.lr, {"loss": 1.0, "tokens": 3.0})
    return stepper


def state_bytes(stepper: OptimizerStepper) -> int:
    """Bytes of all tensors; those that parameters share count once."""
    values = [x for state in stepper.optimizer.state.values() for x in state.values()]
    return sum({x.data_ptr(): x.nbytes for x in values if isinstance(x, Tensor)}.values())


def test_moments_of_8_bits_go_where_those_of_32_do_in_a_quarter_of_the_memory():
    eight, plain = trained(EIGHT), trained(PLAIN)
    start = trained(PLAIN, steps=0).parameters
    for mine, theirs, first in zip(eight.parameters, plain.parameters, start, strict=True):
        moved = float((theirs - first).detach().norm())
        assert float((mine - theirs).detach().norm()) < 0.05 * moved
    torch.testing.assert_close(eight.parameters[1], plain.parameters[1])  # small ones: moments of 32 bits
    assert state_bytes(eight) < 0.27 * state_bytes(plain)


def test_tiny_steps_of_8_bit_moments_move_bfloat16_weights():
    train = Train(lr=1e-5, optimizer="adamw_8bit")
    stepper = trained(train, torch.bfloat16)
    matrix = stepper.parameters[0]
    master = stepper.optimizer.state[matrix]["master"]
    start = trained(train, torch.bfloat16, steps=0).parameters[0].detach().float()
    assert master.dtype == torch.float32
    assert 1e-4 < float((master - start).abs().mean()) < 5e-4
    assert torch.equal(matrix, master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("make", [tiny, adapted])
def test_a_resumed_learner_continues_bit_by_bit(make, optimizer, dtype, tmp_path: Path):
    train = Train(lr=1e-3, optimizer=optimizer)
    batches = [random_batch(seed) for seed in range(4)]
    learner = Learner(make(dtype=dtype), train, Algorithm())
    for batch in batches[:2]:
        learner.update(batch)
    learner.save(tmp_path)
    resumed = Learner(make(dtype=dtype), train, Algorithm())
    resumed.load(tmp_path)
    found = [[one.update(batch) for batch in batches[2:]] for one in (learner, resumed)]
    assert found[0] == found[1]
    for mine, theirs in zip(learner.stepper.parameters, resumed.stepper.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_host_memory_is_no_other_place_for_a_model_on_the_cpu():
    with pytest.raises(RecipeError, match=r"train\.offload"):
        Learner(tiny(), Train(offload="host"), Algorithm())


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(MissingExtraError, match=r"\[8bit\]"):
        OptimizerStepper(tiny(dtype=torch.float32).parameters(), EIGHT)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {
                "train": {"optimizer": "adamw_8bit"},
                "runtime": {"kind": "ray"},
                "pools": {"train": {"devices": 2}},
            },
            r"train\.optimizer",
        ),
        (
            {"train": {"optimizer": "adamw_8bit"}, "model": {"random_init": {}, "dtype": "float64"}},
            r"train\.optimizer",
        ),
        ({"train": {"offload": "host"}, "model": {"random_init": {}, "device": "cpu"}}, r"train\.offload"),
    ],
)
def test_recipes_that_can_t_be_are_refused(sections, key):
    recipe = {"name": "x", "model": {"random_init": {}}, "tasks": {"copy": {"kind": "copy"}}}
    with pytest.raises(Exception, match=key):
        load_recipe(recipe | sections)
