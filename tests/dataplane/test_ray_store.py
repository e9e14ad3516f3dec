"""The ray store: the rules of every store, and what Ray has to do with it."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
import warnings
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.exceptions import ObjectLostError
from torch import Tensor

from practicum.dataplane.batch import BatchRef, plain_keys, plain_tags
from practicum.dataplane.packing import pack
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.ray_store.ray_store import RayStore, RayStoreHandle, start_ray_store
from practicum.dataplane.ray_store.store_index import Put, StoreIndex, decode_answer, start_index
from practicum.dataplane.store import Store
from practicum.errors import DeadlineError, StoreError

from ..cluster import local_ray
from .conformance import MakeStore, StoreConformance
from .conformance_shared import SharedStoreConformance
from .rows import TOKENS, make_batch, make_columns, same
from .threads import PATIENCE

BATCH = make_batch(6)
LENGTHS = [100_000 + key.prompt for key in BATCH.keys]
"""Tokens of rows that are too big to be held by the index."""
SMALL = make_batch(6, partition="small")


def big(shift: int = 0) -> dict[str, Column]:
    return {"response_ids": Ragged.packed(torch.arange(sum(LENGTHS)) + shift, LENGTHS)}


class Writer:
    """An actor that puts rows of both kinds."""

    def __init__(self, handle: RayStoreHandle) -> None:
        self._store = handle.connect(PATIENCE)

    def put(self) -> None:
        self._store.put(BATCH, big())
        self._store.put(SMALL, make_columns(SMALL))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(scope="module")
def indexes(cluster: None) -> list[Any]:
    return [start_index() for _ in range(2)]


@pytest.fixture
def handle(indexes: list[Any]) -> RayStoreHandle:
    handle = RayStoreHandle(indexes[0])
    clear_all(handle.connect(PATIENCE))
    return handle


def clear_all(store: Store) -> None:
    for partition in ("train", "eval", "eval set/1", "small"):
        store.clear(partition)
    assert store.size() == 0


@pytest.fixture
def store(handle: RayStoreHandle) -> RayStore:
    return handle.connect(PATIENCE)


class TestPutsHeldByTheIndex(StoreConformance, SharedStoreConformance):
    @pytest.fixture
    def make_store(self, indexes: list[Any]) -> MakeStore:
        return empty_stores(indexes, inline_bytes=2**30)


class TestPutsInTheObjectStore(StoreConformance, SharedStoreConformance):
    @pytest.fixture
    def make_store(self, indexes: list[Any]) -> MakeStore:
        return empty_stores(indexes, inline_bytes=0)


def empty_stores(indexes: list[Any], inline_bytes: int) -> MakeStore:
    """Makes empty stores; no test of the suite has more than two at the same time."""
    turns = cycle(indexes)

    def make() -> Store:
        store = RayStoreHandle(next(turns), inline_bytes).connect(PATIENCE)
        clear_all(store)
        return store

    return make


def get_ids(store: Store, rows: list[int]) -> Tensor:
    column = store.get(BATCH.take(rows), ["response_ids"])["response_ids"]
    assert isinstance(column, Ragged)
    return column.values


# What is got.


def test_rows_that_were_put_together_are_got_without_copying(store: RayStore) -> None:
    store.put(BATCH, big())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, again = get_ids(store, list(range(6))), get_ids(store, list(range(6)))
        part = get_ids(store, [2, 3])
    assert whole.data_ptr() == again.data_ptr()
    assert part.data_ptr() == whole[sum(LENGTHS[:2]) :].data_ptr()
    assert same(part, whole[sum(LENGTHS[:2]) : sum(LENGTHS[:4])])


def test_what_was_got_stays_when_it_is_replaced_and_cleared(store: RayStore) -> None:
    store.put(BATCH, big())
    got = get_ids(store, list(range(6)))
    for shift in range(1, 4):
        store.put(BATCH, big(shift))
    store.clear("train")
    assert same(got, torch.arange(sum(LENGTHS)))


@pytest.mark.parametrize("inline_bytes", [0, 2**30])
def test_objects_keep_tensors_of_every_kind(handle: RayStoreHandle, inline_bytes: int) -> None:
    store = RayStoreHandle(handle.index, inline_bytes).connect(PATIENCE)
    image = torch.randn(3, 4).to(torch.bfloat16)
    objects = [
        {"image": image, "scalar": torch.tensor(2), "none": torch.empty(0, 3), "mask": torch.ones(2) > 0},
        {"image": image, "turned": image.t(), "nested": [(image[1:], {"x": 1.5}), "text", None, True]},
    ]
    batch = BATCH.take([0, 1])
    store.put(batch, {"multi_modal_inputs": objects})
    assert same(store.get(batch, ["multi_modal_inputs"])["multi_modal_inputs"], objects)


# Processes.


def start_actor(kind: type, *args: object) -> Any:
    return ray.remote(kind).options(num_cpus=0).remote(*args)  # pyright: ignore


@pytest.mark.long
def test_what_a_process_put_stays_when_it_is_killed(handle: RayStoreHandle, store: RayStore) -> None:
    writer = start_actor(Writer, handle)
    ray.get(writer.put.remote(), timeout=PATIENCE)
    ray.kill(writer)
    assert same(store.get(BATCH, ["response_ids"]), big())
    assert same(store.get(SMALL, TOKENS), make_columns(SMALL))


class Owner:
    def share(self, pack: object) -> list[Any]:
        return [ray.put(pack)]


def make_put(batch: BatchRef, spans: dict[str, list[int]], field: str, locator: Any) -> Put:
    tags = plain_tags(batch.tags)
    return Put(batch.partition, plain_keys(batch.keys), tags, spans, (field,), locator)


def lost_put(handle: RayStoreHandle, *, lasting: bool) -> None:
    """Commit rows whose process died after it had shared them and before the index copied them."""
    owner = start_actor(Owner)
    refs = ray.get(owner.share.remote(pack(big())), timeout=PATIENCE)
    ray.kill(owner)
    wait_until_lost(refs)
    put = make_put(BATCH, {"response": LENGTHS}, "response_ids", refs[0])
    handle.connect(PATIENCE, lasting=lasting)._commit(put)


@pytest.mark.long
def test_an_object_that_died_with_its_process_is_named_with_its_rows(
    handle: RayStoreHandle, store: RayStore
) -> None:
    lost_put(handle, lasting=False)
    with pytest.raises(StoreError, match=r"response_ids of prompt 4/.*prompt 1/.* 'train' are lost"):
        store.get(BATCH.take([4, 1]), ["response_ids"])


@pytest.mark.long
def test_a_lasting_put_that_died_with_its_process_is_seen_by_nobody(
    handle: RayStoreHandle, store: RayStore
) -> None:
    with pytest.raises(StoreError, match="could not be copied"):
        lost_put(handle, lasting=True)
    assert store.size() == 0
    store.put(BATCH, big())
    assert same(store.get(BATCH, ["response_ids"]), big())


def test_what_is_being_put_is_cleared_too() -> None:
    """Else rows of a dead process could come after they were cleared."""

    class Slow(StoreIndex):
        async def _copy(self, ref: Any, node: str) -> Any:
            await gate.wait()
            return ref

    async def run() -> int:
        put = make_put(SMALL, {}, "reward", None)
        arguments = pickle.dumps((put, "a node"))
        putting = asyncio.ensure_future(index.call("commit", arguments, ["an object"]))
        await asyncio.sleep(0)
        clearing = asyncio.ensure_future(index.call("clear", pickle.dumps((SMALL.partition, None))))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(putting, clearing)
        return decode_answer(await index.call("size", pickle.dumps((None,))))

    index, gate = Slow(), asyncio.Event()
    assert asyncio.run(run()) == 0


def wait_until_lost(refs: list[Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            ray.get(refs, timeout=PATIENCE)
        except ObjectLostError:
            return
        time.sleep(0.01)
    raise AssertionError("the object outlived its owner")


def test_puts_and_clears_again_and_again_do_not_fill_the_object_store(store: RayStore) -> None:
    for shift in range(20):
        store.put(BATCH, big(shift))
        store.put(BATCH, big(shift + 1))
        assert get_ids(store, [0])[0] == shift + 1
        store.clear("train", BATCH.keys[: shift % 2])
        store.clear("train")
    deadline = time.monotonic() + PATIENCE
    while object_store_bytes() > 2**10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert object_store_bytes() <= 2**10


def object_store_bytes() -> int:
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


# Failures.


def test_a_dead_index_is_named_at_once(cluster: None) -> None:
    handle = start_ray_store(PATIENCE)
    assert list(handle.actors()) == ["the store's index"]
    store = pickle.loads(pickle.dumps(handle)).connect(10 * PATIENCE)
    handle.close()
    handle.close()
    for call in (lambda: store.put(BATCH, big()), lambda: store.size()):
        with pytest.raises(StoreError, match="the store's index died"):
            call()


def test_an_index_that_does_not_answer_is_named_at_the_deadline(handle: RayStoreHandle) -> None:
    pid: Any = ray.get(handle.index.__ray_call__.remote(lambda index: os.getpid()), timeout=30)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match="index did not answer size"):
            handle.connect(0.5).size()
    finally:
        os.kill(pid, signal.SIGCONT)
