"""Weights through Ray's object store: the same bits, read where they lie, gone when nobody needs them."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray._private.internal_api import memory_summary
from tests.cluster import local_ray
from tests.runtime.actors import Caller, Publisher, kinds_of_tensors, start

from practicum.errors import DeadlineError, EngineError
from practicum.runtime.ray.actor_calls import ask
from practicum.runtime.ray.weight_transport import Manifest, publish, receive

NUMEL = 2**18  # a mebibyte of float32


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(scope="module")
def learner(cluster: None) -> Any:
    return start(Publisher)


def published(learner: Any, version: int, numel: int = NUMEL) -> Manifest:
    return ask([learner.publish.remote(version, numel)], timeout=60, owner="test", who=["learner"])[0]


def values(manifest: Manifest) -> set[float]:
    return {float(x) for _, tensor in receive(manifest, timeout=60) for x in tensor[[0, -1]]}


def test_every_kind_of_tensor_comes_back_bit_for_bit(cluster: None):
    weights = list(kinds_of_tensors().items())
    got = list(receive(publish(iter(weights), 3, bucket_bytes=4096), timeout=60))
    assert [name for name, _ in got] == [name for name, _ in weights]
    for (name, tensor), (_, expected) in zip(got, weights, strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert torch.equal(tensor, expected.detach()), name
        assert not tensor.requires_grad


@pytest.mark.skipif(find_spec("nixl") is not None, reason="tests/vllm/test_nixl.py is for where it is")
def test_nixl_that_is_not_installed_is_named(cluster: None):
    with pytest.raises(EngineError, match=r"pip install 'practicum\[nixl\]' on every machine"):
        publish([("w", torch.ones(3))], 1, "nixl")
    assert not any(bucket.is_direct for bucket in publish([("w", torch.ones(3))], 1, "auto").buckets)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), limit=st.integers(1, 100))
def test_buckets_are_full_but_not_over(cluster: None, sizes: list[int], limit: int):
    weights = [(f"w{i}", torch.arange(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    manifest = publish(iter(weights), 1, bucket_bytes=limit)
    assert manifest.nbytes == sum(sizes)
    assert all(b.nbytes <= max(limit, *sizes) for b in manifest.buckets)
    for bucket, following in zip(manifest.buckets, manifest.buckets[1:], strict=False):
        assert bucket.nbytes + following.nbytes > limit
    received = list(receive(manifest, timeout=60))
    assert [name for name, _ in received] == [name for name, _ in weights]
    assert all(torch.equal(t, dict(weights)[n]) for n, t in received)


def test_what_the_learner_does_next_is_not_seen(cluster: None):
    for numel in (10, NUMEL):  # Ray keeps small objects elsewhere than large ones
        weight = torch.ones(numel)
        manifest = publish([("w", weight)], 1)
        weight.zero_()
        assert values(manifest) == {1.0}


def test_readers_of_one_node_share_the_memory(learner):
    manifest = published(learner, 5)
    one, two = (dict(receive(manifest, timeout=60)) for _ in range(2))
    assert [t.data_ptr() for t in one.values()] == [t.data_ptr() for t in two.values()]


def held_mib() -> float:
    summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Plasma memory usage ([\d.]+) MiB", summary)
    assert found is not None
    return float(found[1])


def wait_until_freed() -> None:
    """Wait until the store is empty. Ray frees an object a little after its last reference."""
    deadline = time.monotonic() + 30
    while held_mib() > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert held_mib() == 0


def test_bytes_are_freed_with_the_last_manifest(learner):
    wait_until_freed()
    manifest = published(learner, 0)
    assert held_mib() >= 4
    for version in range(1, 30):
        manifest = published(learner, version)
        assert values(manifest) == {float(version)}
    del manifest
    wait_until_freed()


@pytest.mark.long
def test_weights_whose_learner_died_are_lost_by_name(cluster: None):
    learner = start(Publisher)
    manifest = published(learner, 7)
    os.kill(ask([learner.pid.remote()], timeout=60, owner="test", who=["learner"])[0], signal.SIGKILL)

    def read_on() -> None:
        while values(manifest) == {7.0}:  # until Ray has noticed the death, which is soon
            time.sleep(0.1)

    with pytest.raises(EngineError, match="weights of version 7 are lost: the learner"):
        read_on()


def test_a_bucket_that_does_not_come_passes_the_deadline(learner):
    bucket = published(learner, 1).buckets[0]
    never = start(Caller)
    awaited = dataclasses.replace(bucket, ref=never.waits.remote())
    with pytest.raises(DeadlineError, match=r"version 4 did not arrive within 0\.2 s: bucket 1 of 2"):
        list(receive(Manifest(4, (bucket, awaited)), timeout=0.2))
