"""The probe after each sync of weights stops a run whose engine does not have the learner's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum.checks.watch import Watch
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import CheckError
from practicum.learning.learner import Learner
from practicum.recipe.schema.recipe import Checks, Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.local import LocalRoles, start_local

STALE = "stale or corrupt weights"
BROKEN = {"options": {"worker_extension_cls": "tests.vllm.broken.BrokenWorker"}}
Weights = Iterator[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def how(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written there breaks the loads of vLLM's process."""
    file = tmp_path_factory.mktemp("broken") / "how"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def shared(how: Path) -> Iterator[LocalRoles]:
    recipe = Recipe.model_validate(
        {
            "name": "sync",
            "model": {"make": {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}},
            "tasks": {"sort": {"kind": "sort"}},
            "rollout": {"engine": "vllm", "slots": 4, "max_new_tokens": 8, "vllm": BROKEN},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PRACTICUM_TEST_BREAK", str(how))
        roles = start_local(recipe, make_plan(recipe), Watch(recipe.checks, print))
    yield roles
    roles.close()


@pytest.fixture
def roles(shared: LocalRoles, how: Path) -> Iterator[LocalRoles]:
    """Engine and learner agree before, and again after, whatever happened."""
    shared.sync_weights()
    yield shared
    how.write_text("")
    shared.sync_weights()


def update(learner: Learner, size: float = 0.02) -> dict[str, Tensor]:
    """Other weights, as an optimizer step makes them; gives those of before."""
    before = {name: tensor.detach().clone() for name, tensor in learner.named_weights()}
    generator = torch.Generator().manual_seed(learner.version)
    with torch.no_grad():
        for _, tensor in learner.named_weights():
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    learner.version += 1
    return before


def sending(patch: pytest.MonkeyPatch, learner: Learner, change: Callable[[str, Tensor], Tensor]) -> None:
    """From here on, the learner sends its weights changed."""
    weights = learner.named_weights

    def changed() -> Weights:
        return ((name, change(name, tensor)) for name, tensor in weights())

    patch.setattr(learner, "named_weights", changed)


def test_a_whole_sync_passes_and_versions_agree(roles: LocalRoles):
    for _ in range(2):
        update(roles.rank.student.learner)
        roles.sync_weights()
    assert roles.engine.version == roles.version


@pytest.mark.parametrize("size", [0.02, 1e-6])
def test_a_sync_that_was_skipped_is_caught_however_small_the_update(
    roles: LocalRoles, monkeypatch: pytest.MonkeyPatch, size: float
):
    def skip(self: VllmEngine, weights: Any, version: int) -> None:
        self.version = version

    update(roles.rank.student.learner, size)
    with monkeypatch.context() as patch:
        patch.setattr(VllmEngine, "load_weights", skip)
        with pytest.raises(CheckError, match=f"{STALE}.*still has those of before the update"):
            roles.sync_weights()


def test_a_partial_sync_is_caught(roles: LocalRoles, monkeypatch: pytest.MonkeyPatch):
    learner = roles.rank.student.learner
    before = update(learner)
    with monkeypatch.context() as patch:
        sending(patch, learner, lambda name, new: before[name] if "layers.1." in name else new)
        with pytest.raises(CheckError, match=STALE):
            roles.sync_weights()


def test_a_transposed_matrix_is_caught(roles: LocalRoles, monkeypatch: pytest.MonkeyPatch):
    learner = roles.rank.student.learner
    update(learner)
    with monkeypatch.context() as patch:
        sending(patch, learner, lambda name, new: new.T if "layers.0.self_attn.o_proj" in name else new)
        with pytest.raises(CheckError, match=STALE):
            roles.sync_weights()


def test_prompts_computed_with_older_weights_are_caught(roles: LocalRoles, monkeypatch: pytest.MonkeyPatch):
    update(roles.rank.student.learner)
    with monkeypatch.context() as patch:
        patch.setattr(VllmEngine, "_reset_cache", lambda self: None)
        with pytest.raises(CheckError, match=f"{STALE}.*its prefix cache is of older weights"):
            roles.sync_weights()


def test_a_tied_head_that_was_forgotten_is_caught(roles: LocalRoles, how: Path):
    update(roles.rank.student.learner)
    how.write_text("head")
    with pytest.raises(CheckError, match=STALE):
        roles.sync_weights()


def test_warn_lets_the_run_go_on_and_counts_it(roles: LocalRoles, how: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    watch = Watch(Checks(level="warn"), said.append)
    monkeypatch.setattr(roles.probes[0], "_watch", watch)
    update(roles.rank.student.learner)
    how.write_text("head")
    roles.sync_weights()
    assert watch.fired["fingerprint"] == 1
    assert STALE in said[0]
