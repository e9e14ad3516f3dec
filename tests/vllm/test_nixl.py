"""Weights by NIXL: from the learner's device to the engines', not through Ray's object store.

There is no GPU here; NIXL moves the host's memory by the same calls, from process to process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
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
from tests.vllm.models import resident

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
    pid, before = call(learner.pid.remote()), 0
    for version in range(2, 42):
        manifest = published(learner, version)
        assert {float(x[0]) for x in read(engine, manifest).values()} == {float(version)}
        if version == 6:
            before = resident(pid)
    assert {float(x[-1]) for x in read(engine, first).values()} == {1.0}
    late = start(Reader)  # a replica that was restarted
    assert {float(x[-1]) for x in read(late, manifest).values()} == {41.0}
    # Of 35 more versions only some were not freed yet.
    assert resident(pid) < before + 10 * manifest.nbytes


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
        with pytest.raises((DeadlineError, EngineError), match="version 3"):
            read(start(Reader), manifest, timeout=3)
    finally:
        os.kill(pid, signal.SIGCONT)
        ray.kill(learner)
