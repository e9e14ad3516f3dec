"""The engine samples with other weights, or with another model, than the learner has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

from practicum.checks.invariants import logprob_gap
from practicum.compat.peft import ADAPTER
from practicum.dataplane.ragged import Ragged
from practicum.engines.torch import torch_engine
from practicum.engines.torch.make_torch import TorchKind
from practicum.engines.torch.model_runner import ModelRunner
from practicum.engines.torch.prompt_cache import CachedSequence, SequenceCache
from practicum.errors import CheckError, EngineError
from practicum.learning.learner import Learner
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowExtras
from practicum.models import attention, load_model
from practicum.models.offloaded_weights import take_weights
from practicum.models.packed_attention import Ints, PackedLayout, Segments
from practicum.models.padded_attention import AttentionRule
from practicum.models.state_layers import StateLayer, _Block
from practicum.models.token_tree import TokenRows
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Checks, Train
from practicum.roles.run_stage import StepInfo
from practicum.roles.student import StudentRole
from practicum.runtime.local import LocalRoles

from ..learning.reference import random_batch, with_shared_beginnings
from ..learning.test_moe import MODEL, other_experts, slow_logprobs
from ..models.families import tiny_family
from ..models.test_attention_families import family
from .steps import passes, started, take_steps

Weights = Iterable[tuple[str, Tensor]]


@pytest.fixture
def own_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any, Weights], None]], None]:
    """Give the engine a model of its own, which takes the learner's weights by this function."""

    for_rollout = TorchKind.for_rollout

    def copied(self: TorchKind, rollout: Any, path: Any, model: Any, weights: Any) -> Any:
        return for_rollout(self, rollout, path, copy.deepcopy(model), weights)

    def use(take: Callable[[Any, Weights], None]) -> None:
        monkeypatch.setattr(TorchKind, "for_rollout", copied)
        monkeypatch.setattr(torch_engine, "take_weights", take)

    return use


def test_an_engine_that_keeps_its_old_weights(own_weights: Any):
    """huggingface/trl#5312: the engine woke from its sleep with weights of before the update."""
    own_weights(take_weights)
    assert take_steps("plain")
    own_weights(lambda model, weights: None)
    with pytest.raises(CheckError, match=r"check fingerprint: stale .* still has the weights of before"):
        take_steps("plain")


def test_weights_that_arrive_in_part(own_weights: Any):
    """NovaSky-AI/SkyRL#1680, areal-project/AReaL#1595: some of a model's weights were loaded wrongly or not
    at all, and rollouts went on with them."""

    def some(model: Any, weights: Weights) -> None:
        kept = dict(model.named_parameters())
        take_weights(model, [(name, kept[name] if "layers.1." in name else new) for name, new in weights])

    own_weights(take_weights)
    assert take_steps("plain")
    own_weights(some)
    with pytest.raises(CheckError, match=r"check fingerprint: stale or corrupt weights"):
        take_steps("plain")


def test_an_adapter_that_never_arrives(own_weights: Any):
    """modelscope/ms-swift#9855, unslothai/unsloth#8701: adapters were trained and sent, and every rollout was
    sampled by the base model."""

    def of_the_base(model: Any, weights: Weights) -> None:
        take_weights(model, [(name, new * 0.0 if "lora_B" in name else new) for name, new in weights])

    own_weights(take_weights)
    assert take_steps("adapter")
    own_weights(of_the_base)
    with pytest.raises(CheckError, match=r"check fingerprint: stale .* still has the weights of before"):
        take_steps("adapter")
    own_weights(lambda model, weights: take_weights(model, [x for x in weights if "lora_" not in x[0]]))
    with pytest.raises(EngineError, match=r"weights do not fit the engine's model: .*lora_A"):
        take_steps("adapter")


def test_a_base_that_drifts_as_its_adapter_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """huggingface/trl#6688: the adapter was merged into a base in bfloat16 for each sync and taken out again:
    what rounding left behind added up."""
    with started("half") as runner:
        assert all(runner.step(number)["train/grad_norm"] > 0 for number in (1, 2))
        runner.roles.save(tmp_path / "whole", [])
    sync = LocalRoles.sync_weights

    def merging(roles: LocalRoles) -> None:
        layers = [m for m in roles.rank.student.learner.model.modules() if isinstance(m, LoraLayer)]
        for layer in layers:
            layer.merge(adapter_names=[ADAPTER])
        for layer in layers:
            layer.unmerge()
        sync(roles)

    monkeypatch.setattr(LocalRoles, "sync_weights", merging)
    with started("half") as runner:
        runner.step(1)
        with pytest.raises(CheckError, match=r"the base of the adapter has changed since it was loaded"):
            runner.roles.save(tmp_path / "drifted", [])


def test_a_sync_that_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """rllm-org/rllm#291: with one setting of the engine's cache, weights were never sent to it."""
    assert passes("plain")
    monkeypatch.setattr(LocalRoles, "sync_weights", lambda roles: None)
    with pytest.raises(CheckError, match=r"check weight_version: .* the engine missed an update"):
        take_steps("plain")


def test_keys_and_values_that_outlive_an_update(monkeypatch: pytest.MonkeyPatch):
    """huggingface/trl#3024, vllm-project/vllm#9744, NVIDIA-NeMo/RL#4018: prompts were continued from keys and
    values of older weights."""
    assert passes("cached")

    def never(cache: SequenceCache, *_: CachedSequence | int) -> None:
        pass

    monkeypatch.setattr(SequenceCache, "clear", never)
    monkeypatch.setattr(SequenceCache, "use", never)
    with pytest.raises(CheckError, match=r"check logprob_gap: rollout and learner logprobs differ"):
        take_steps("cached")


def test_a_reference_that_takes_the_place_of_the_student(monkeypatch: pytest.MonkeyPatch):
    """THUDM/slime#774: with a reference, the ratio of the first update was not 1: student and reference took
    turns in one model."""
    assert passes("kl")
    logprobs = StudentRole.ref_logprobs

    @wraps(logprobs)
    def left_in_place(role: StudentRole, step: StepInfo) -> Any:
        assert role.reference is not None
        take_weights(role.learner.model, role.reference.trunk.model.named_parameters())
        return logprobs(role, step)

    monkeypatch.setattr(StudentRole, "ref_logprobs", left_in_place)
    with pytest.raises(CheckError, match=r"check logprob_gap: rollout and learner logprobs differ"):
        take_steps("kl")


def test_attention_sinks_that_are_left_out(monkeypatch: pytest.MonkeyPatch):
    """radixark/miles#1500, verl-project/verl#3894, NVIDIA-NeMo/RL#1672: the learner's attention left out the
    sinks that the model has, without a word, and its logprobs were not the engine's."""
    model = family("gpt_oss")
    assert ModelRunner(model).lean is None
    monkeypatch.setattr(
        attention,
        "AttentionRule",
        lambda scale, window, softcap, sinks: AttentionRule(scale, window, softcap),
    )
    with pytest.raises(EngineError, match=r"logits of GptOssForCausalLM with packed attention differ"):
        ModelRunner(model)


def test_a_state_that_passes_from_row_to_row(monkeypatch: pytest.MonkeyPatch):
    """NVIDIA-NeMo/Automodel#2131, THUDM/slime#1686, modelscope/ms-swift#9565: packed rows went through the
    layers that carry a state as one sequence, so that each row began with the state of the one before."""
    model = tiny_family("qwen3_5_text")
    assert PackedModel(model, Train()).gap < 1e-5

    def as_one_sequence(layout: PackedLayout, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        return layer.run(hidden_NH.unsqueeze(0))[0].squeeze(0)

    def from_the_other_prompt(*args: Any) -> _Block:
        block = block_of(*args)
        return block if block.parent_B is None else replace(block, parent_B=1 - block.parent_B)

    block_of = _Block.of
    for owner, name, wrong in (PackedLayout, "mix", as_one_sequence), (_Block, "of", from_the_other_prompt):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            with pytest.raises(EngineError, match=r"Qwen3_5ForCausalLM: packed rows differ from the model's"):
                PackedModel(model, Train())


def test_a_branch_that_sees_only_the_root(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#6689: the mask of a prefix tree knew one prefix and its leaves, so in a deeper tree
    a leaf did not see the branch that it continues."""
    model = tiny_family("qwen3")
    assert PackedModel(model, Train()).gap < 1e-5

    def root_of(segments: Segments) -> list[Ints]:
        starts, ends = segments.starts, segments.starts + segments.lengths
        return [np.arange(starts[0], ends[0]) if prefix >= 0 else starts[:0] for prefix in segments.prefixes]

    monkeypatch.setattr(Segments, "before", root_of)
    with pytest.raises(EngineError, match=r"packed rows differ from the model's forward pass"):
        PackedModel(model, Train())


def test_a_branch_that_sees_its_siblings(monkeypatch: pytest.MonkeyPatch):
    """allenai/open-instruct#669: rows that were packed together attended to all that was before them."""
    model = tiny_family("qwen3")
    assert PackedModel(model, Train()).gap < 1e-5

    def all_before(segments: Segments) -> list[Ints]:
        return [np.arange(start) for start in segments.starts.tolist()]

    monkeypatch.setattr(Segments, "before", all_before)
    with pytest.raises(EngineError, match=r"packed rows differ from the model's forward pass"):
        PackedModel(model, Train())


def test_rows_that_share_tokens_of_other_experts(monkeypatch: pytest.MonkeyPatch):
    """NovaSky-AI/SkyRL#1908: recorded experts were replayed at tokens that had taken others."""
    batch, engine = random_batch(4), MODEL
    experts = other_experts(with_shared_beginnings(batch))
    batch = replace(with_shared_beginnings(batch), extras=RowExtras(routed_experts=experts))
    plain = Ragged.packed(slow_logprobs(engine, batch, experts), batch.response_ids.lengths)

    def found() -> str | None:
        learner = Learner(copy.deepcopy(engine), Train(), Algorithm(loss="reinforce"))
        return logprob_gap(learner.update(replace(batch, plain_logprobs=plain)), Checks().logprob_gap_max)

    assert found() is None
    make = TokenRows.__init__
    monkeypatch.setattr(TokenRows, "__init__", lambda self, *parts: make(self, *parts[:3]))
    assert found()


def test_dropout_that_is_left_on(monkeypatch: pytest.MonkeyPatch):
    """huggingface/trl#3500: with dropout in the learner's model, the KL to the reference was in the thousands
    at the first step."""
    assert passes("gpt2")
    ready = load_model.ready

    def with_dropout(*args: Any, **options: Any) -> Any:
        model = ready(*args, **options)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
                module.train()
        return model

    monkeypatch.setattr(load_model, "ready", with_dropout)
    with pytest.raises(EngineError, match=r"packed rows differ from the model's forward pass"):
        take_steps("gpt2")
