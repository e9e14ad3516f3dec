"""The probe after each sync of weights stops a run whose engine does not have the learner's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import CheckError
from practicum.runtime.local import LocalRoles
from tests.vllm.models import started, update

STALE = "stale or corrupt weights"
BROKEN = {"worker_extension_cls": "tests.vllm.broken.BrokenWorker"}
Weights = Iterator[tuple[str, Tensor]]


@pytest.fixture(scope="module")
def how(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is written there breaks the loads of vLLM's process."""
    file = tmp_path_factory.mktemp("broken") / "how"
    file.write_text("")
    return file


@pytest.fixture(scope="module")
def shared(how: Path) -> Iterator[LocalRoles]:
    rollout = {"engine": "vllm", "max_num_seqs": 4, "max_new_tokens": 8, "vllm": BROKEN}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PRACTICUM_TEST_BREAK", str(how))
        with started({"rollout": rollout}) as roles:
            yield roles


@pytest.fixture
def roles(shared: LocalRoles, how: Path) -> Iterator[LocalRoles]:
    """Engine and learner agree before, and again after, whatever happened."""
    shared.sync_weights()
    yield shared
    how.write_text("")
    shared.sync_weights()


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
        with pytest.raises(CheckError, match=f"{STALE}.*still has the weights of before the update"):
            roles.sync_weights()


@pytest.mark.parametrize("damage", ["partial", "transposed"])
def test_weights_that_are_partial_or_transposed_are_caught(
    roles: LocalRoles, monkeypatch: pytest.MonkeyPatch, damage: str
):
    learner = roles.rank.student.learner
    weights, before = learner.named_weights, update(learner)

    def damaged() -> Weights:
        for name, new in weights():
            if damage == "partial":
                yield name, before[name] if "layers.1." in name else new
            else:
                yield name, new.T if "layers.0.self_attn.o_proj" in name else new

    with monkeypatch.context() as patch:
        patch.setattr(learner, "named_weights", damaged)
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
