"""A student's adapter in vLLM: it travels alone, is the learner's after each sync, and is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from practicum.engines.vllm.make_vllm import VllmKind
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import EngineError
from practicum.models.load_model import load_model
from practicum.models.lora import adapter_off
from practicum.recipe.schema.recipe import Model
from practicum.runtime.local import LocalRoles
from practicum.tasks.stream import make_stream
from practicum.trainer.sample_step import TRAIN, training_attempts

from ..teachers.models import rows
from .models import logprobs, save_model, started, update

ROWS = rows(16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    save_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shared(base: str) -> Iterator[LocalRoles]:
    rollout = {"engine": "vllm", "max_num_seqs": 4, "max_new_tokens": 8}
    with started({"model": {"path": base, "lora": {"rank": 4}}, "rollout": rollout}) as roles:
        yield roles


@pytest.fixture
def roles(shared: LocalRoles) -> Iterator[LocalRoles]:
    shared.sync_weights()
    yield shared
    shared.sync_weights()


def engine_of(roles: LocalRoles) -> VllmEngine:
    assert isinstance(roles.engine, VllmEngine)
    return roles.engine


def change(roles: LocalRoles) -> None:
    update(roles.rank.student.learner, 0.1)


def expected(roles: LocalRoles) -> Tensor:
    return logprobs(roles.rank.student.learner.model, ROWS)


def test_each_sync_brings_the_adapter_and_nothing_else(roles: LocalRoles):
    engine = engine_of(roles)
    before = expected(roles)
    for _ in range(3):
        change(roles)
        roles.sync_weights()
        assert engine._sent_adapter is not None
        sent = sum(file.stat().st_size for file in Path(engine._sent_adapter[1].name).iterdir())
        assert sent < 0.2 * engine.facts.weights
        torch.testing.assert_close(logprobs(engine, ROWS), expected(roles), rtol=0, atol=2e-4)
    assert (logprobs(engine, ROWS) - before).abs().max() > 0.05
    assert engine.version == roles.version
    with adapter_off(roles.rank.student.learner.model):
        assert (logprobs(engine, ROWS) - expected(roles)).abs().max() > 0.05, "it is not the base"


def test_answers_are_sampled_with_the_adapter(roles: LocalRoles):
    change(roles)
    roles.sync_weights()
    recipe = roles.recipe
    attempts = training_attempts(recipe, make_stream(recipe.tasks, recipe.seed).take(4), roles.stop)
    batch = roles.rollout.rollout(attempts, TRAIN, seed=1)
    columns = roles.store.get(batch, ("prompt_ids", "response_ids", "rollout_logprobs"))
    prompts, responses, sampled = (columns[name] for name in columns)
    learnt = roles.rank.student.learner.scorer.logprobs(prompts, responses, temperature=1.0)  # pyright: ignore
    torch.testing.assert_close(sampled.values, learnt.values, rtol=0, atol=1e-3)  # pyright: ignore


@pytest.mark.parametrize("damage", ["garbled", "elsewhere"])
def test_an_adapter_that_vllm_can_not_take_is_an_error_by_name(
    roles: LocalRoles, monkeypatch: pytest.MonkeyPatch, damage: str
):
    engine = engine_of(roles)
    write = engine._write_adapter
    assert write is not None

    def damaged(folder: Path, weights: Mapping[str, Tensor]) -> None:
        if damage == "elsewhere":
            weights = {name.replace("q_proj", "no_proj"): x for name, x in weights.items()}
        write(folder, weights)
        if damage == "garbled":
            file = folder / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:-10])

    monkeypatch.setattr(engine, "_write_adapter", damaged)
    with pytest.raises(EngineError, match=f"can't take the adapter of version {roles.version}"):
        roles.sync_weights()
    with pytest.raises(EngineError, match="load another"):
        logprobs(engine, ROWS)


def test_a_sleeping_engine_frees_kv_memory_and_comes_back_with_the_adapter(roles: LocalRoles):
    engine = engine_of(roles)
    change(roles)
    roles.sync_weights()
    before, held = logprobs(engine, ROWS), engine.memory()
    freed = engine.sleep()
    assert (freed.weights, freed.kv) == (0, held.kv)
    assert engine.memory().weights == held.weights, "the base stays"
    engine.wake()
    assert torch.equal(logprobs(engine, ROWS), before)


def test_models_whose_adapters_vllm_does_not_take_are_merged():
    moe = Model.model_validate(
        {"random_init": {"family": "qwen3_moe", "hidden": 32, "layers": 1}, "lora": {}}
    )
    assert VllmKind().merges_adapter(load_model(moe, 0))
