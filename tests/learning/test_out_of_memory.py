"""An update that runs out of memory is done again with smaller micro-batches, and comes to the same."""

from __future__ import annotations

import copy
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from practicum.devices import is_out_of_memory
from practicum.errors import PracticumError
from practicum.learning import memory_probe
from practicum.learning.learner import Learner
from practicum.learning.memory_probe import is_worth_trying, probe_memory
from practicum.learning.packed_model import PackedModel
from practicum.processes.host_memory import at_most
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from .reference import random_batch, tiny
from .updates import assert_same, learn

ALGORITHM = Algorithm(loss="ppo_clip", entropy=0.1)
TRAIN = Train(eps=1e-3)


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
        PracticumError, match=r"(?s)one row, which can't be cut.*train\.gradient_checkpointing"
    ):
        learner.update(random_batch(3))
    assert learner.version == 0


def test_other_errors_are_passed_on(limited):
    learner = Learner(tiny(), TRAIN, ALGORITHM)
    limited(3, "shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        learner.update(random_batch(3))


def test_a_probe_before_the_first_step_leaves_no_trace():
    model, batch = tiny(), random_batch(3)
    plain, _ = learn(model, batch, TRAIN, ALGORITHM)
    learner = Learner(copy.deepcopy(model), TRAIN, ALGORITHM)
    told = probe_memory(learner, 20, 30, planned=3 * 2**30)
    assert told is None or re.search(r"rows of 50 tokens, .* GiB at most; `practicum plan` says 3\.0", told)
    assert not learner.stepper.optimizer.state
    assert all(p.grad is None for p in learner.stepper.parameters)
    learner.update(batch)
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, plain.weights[name])


def test_a_probe_finds_micro_batches_that_fit_and_rows_that_do_not(limited):
    learner = Learner(tiny(), TRAIN, ALGORITHM)
    limited(100)
    probe_memory(learner, 20, 30)
    assert learner.trunk.token_budget < 2 * 100
    with pytest.raises(PracticumError, match=r"(?s)micro-batch of 139 tokens.*rollout\.max_new_tokens"):
        probe_memory(learner, 100, 40)
    assert all(p.grad is None for p in learner.stepper.parameters)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process can't limit its memory so")
def test_memory_that_a_cpu_does_not_have_is_an_error_and_not_the_end_of_the_process():
    with at_most(8 * 2**20), pytest.raises(RuntimeError) as raised:
        torch.empty(2**32)
    assert is_out_of_memory(raised.value)
    torch.ones(2**23).sum()  # the limit is gone


def test_the_probe_takes_no_more_than_what_is_left(monkeypatch):
    limits = []
    monkeypatch.setattr(memory_probe, "available_memory", lambda: 2**33)
    monkeypatch.setattr(memory_probe, "at_most", lambda more: limits.append(more) or nullcontext())
    probe_memory(Learner(tiny(), TRAIN, ALGORITHM), 20, 30)
    assert limits == [2**33]


def test_only_runs_that_take_much_of_a_cpu_s_memory_are_tried(monkeypatch):
    monkeypatch.setattr(memory_probe, "available_memory", lambda: 1000)
    cpu = torch.device("cpu")
    assert is_worth_trying(cpu, 300.0)
    assert not is_worth_trying(cpu, 200.0)
    assert not is_worth_trying(cpu, None)
    assert is_worth_trying(torch.device("cuda"), None)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_the_probe_makes_the_state_that_the_optimizer_will_have(monkeypatch, optimizer, offload):
    train = TRAIN.model_copy(update={"optimizer": optimizer, "offload": offload})
    learner = Learner(tiny(dtype=torch.bfloat16), train, ALGORITHM)
    made: list[dict[str, torch.Tensor]] = []
    make = memory_probe._made_state
    monkeypatch.setattr(memory_probe, "_made_state", lambda found: made.extend(make(found)) or made)
    probe_memory(learner, 20, 30)
    learner.update(random_batch(3))
    with learner.stepper.state_in_place():
        state = [dict(learner.stepper.optimizer.state[p]) for p in learner.stepper.parameters]
    assert [{n: (x.shape, x.dtype) for n, x in s.items()} for s in made] == [
        {n: (x.shape, x.dtype) for n, x in s.items()} for s in state
    ]
