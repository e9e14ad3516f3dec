"""Weights by NIXL: from the learner's device to the engines', not through Ray's object store.

There is no GPU here; NIXL moves the host's memory by the same calls, from process to process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

pytest.importorskip("nixl")

from practicum.errors import DeadlineError, EngineError
from practicum.runtime.ray.actor_calls import ask
from practicum.runtime.ray.weight_transport import Manifest
from tests.cluster import local_ray
from tests.runtime.actors import Publisher, Reader, start
from tests.vllm.test_ray import LATE, LETTERS, train

NUMEL = 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture
def learner(cluster: None) -> Iterator[Any]:
    actor = start(Publisher)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def engine(cluster: None) -> Any:
    return start(Reader)


def call(ref: Any) -> Any:
    return ask([ref], timeout=120, owner="test", who=["worker"])[0]


def published(learner: Any, version: int, numel: int = NUMEL) -> Manifest:
    return call(learner.publish.remote(version, numel, "nixl"))


def read(engine: Any, manifest: Manifest, timeout: float = 60) -> dict[str, Any]:
    return call(engine.read.remote(manifest, timeout))


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_every_kind_of_tensor_comes_bit_for_bit(learner: Any, engine: Any):
    sent, manifest = call(learner.publish_kinds.remote("nixl"))
    assert len(manifest.buckets) > 2
    assert all(bucket.is_direct for bucket in manifest.buckets)
    got = read(engine, manifest)
    assert list(got) == list(sent)
    for name, tensor in got.items():
        assert (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape), name
        assert torch.equal(tensor, sent[name]), name


def test_versions_live_as_long_as_somebody_needs_them(learner: Any, engine: Any):
    manifest = first = published(learner, 1)
    pid, before = call(learner.pid.remote()), 0.0
    for version in range(2, 42):
        manifest = published(learner, version)
        assert {float(x[0]) for x in read(engine, manifest).values()} == {float(version)}
        if version == 6:
            before = resident_mib(pid)
    assert {float(x[-1]) for x in read(engine, first).values()} == {1.0}
    late = start(Reader)  # a replica that was restarted
    assert {float(x[-1]) for x in read(late, manifest).values()} == {41.0}
    # Of 35 more versions only some were not freed yet.
    assert resident_mib(pid) < before + 10 * manifest.nbytes / 2**20


def test_weights_whose_learner_died_are_lost_by_name(learner: Any, engine: Any):
    manifest = published(learner, 7)
    os.kill(call(learner.pid.remote()), signal.SIGKILL)

    def read_on() -> None:
        while read(engine, manifest):
            time.sleep(0.1)

    lost = r"weights of version 7 (are lost: the learner|did not come by NIXL)"
    with pytest.raises(EngineError, match=lost):
        read_on()


def test_a_learner_that_hangs_passes_the_deadline(cluster: None, engine: Any):
    learner = start(Publisher)
    manifest, pid = published(learner, 3), call(learner.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises((DeadlineError, EngineError), match="version 3"):
            read(start(Reader), manifest, timeout=3)
        assert time.monotonic() - begun < 60
    finally:
        os.kill(pid, signal.SIGCONT)
        ray.kill(learner)


SHORT = {
    **LATE,
    "rollout": {**LATE["rollout"], "engine": "torch"},
    "train": {"steps": 3, "prompts": 4, "lr": 1e-3},
    "checkpoint": {"every": 1},
    "eval": {"rows": 2, "every": 3},
}
CASES: dict[str, dict[str, Any]] = {
    "lag": SHORT,
    "copy": {
        **SHORT,
        "rollout": {**SHORT["rollout"], "lag": 0},
        "teachers": {"self": {"student": {"every": 1}, "placement": "own"}},
        "distill": {"top_k": 4},
    },
}


def by(recipe: dict[str, Any], transport: str) -> dict[str, Any]:
    return {**recipe, "train": {**recipe["train"], "optimizer": f"letters:{transport}"}}


OPTIMIZERS = """
from torch.optim import AdamW

from practicum.runtime.ray import weight_transport

def object_store(parameters, train):
    return AdamW([p for p in parameters if p.requires_grad], lr=train.lr)

def nixl(parameters, train):
    weight_transport._can_go_direct = lambda tensor: True  # as on a GPU
    return object_store(parameters, train)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_by_either_way(tmp_path: Path, case: str):
    found = {}
    for transport in ("object_store", "nixl"):
        folder = tmp_path / transport
        folder.mkdir()
        (folder / "letters.py").write_text(LETTERS + OPTIMIZERS)
        said, metrics = train(folder, by(CASES[case], transport))
        assert "NIXL" not in said
        losses = [row["train/loss"] for row in metrics if "train/loss" in row]
        assert len(losses) == 3
        found[transport] = losses, (folder / "out" / "export" / "model.safetensors").read_bytes()
        kept = [path for path in (folder / "out").rglob("*.safetensors") if "sampling" in path.parts]
        assert bool(kept) == (case == "lag"), "a checkpoint with a lag has what was published"
    assert found["nixl"] == found["object_store"]


@pytest.mark.timeout(600)
def test_vllm_on_ray_takes_them_too(tmp_path: Path):
    (tmp_path / "letters.py").write_text(LETTERS + OPTIMIZERS)
    recipe = {**LATE, "train": {**LATE["train"], "steps": 2}, "rollout": {**LATE["rollout"], "lag": 0}}
    _, metrics = train(tmp_path, by(recipe, "nixl"))
    gaps = [row["train/gap_max"] for row in metrics if "train/gap_max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
