"""The transferqueue store: the rules of every store, what it frees, and how it fails."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("transfer_queue")

import ray

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.packing import pack
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.ray_store.store_index import start_index
from practicum.dataplane.store import Store
from practicum.dataplane.transferqueue import tq_client
from practicum.dataplane.transferqueue.tq_client import BlobMissing, client_of, close_client
from practicum.dataplane.transferqueue.transferqueue_store import (
    TransferQueueHandle,
    read_blob,
    start_transferqueue,
)
from practicum.errors import DeadlineError, RecipeError, StoreError

from ..cluster import local_ray
from .bad_columns import uneven
from .conformance import MakeStore, StoreConformance
from .conformance_shared import SharedStoreConformance
from .rows import make_batch, make_columns, same
from .threads import PATIENCE

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with local_ray(cpus=8):
        yield


@pytest.fixture(scope="module")
def handle(ray_cluster: None) -> Iterator[TransferQueueHandle]:
    handle = start_transferqueue(units=2)
    yield handle
    handle.close()


@pytest.fixture(scope="module")
def stores(handle: TransferQueueHandle) -> list[Store]:
    """Two on the same servers, each with an index of its own."""
    other = replace(handle, index=start_index(report_freed=True))
    return [handle.connect(), other.connect()]


def emptied(store: Store) -> Store:
    for partition in ("train", "eval", "eval set/1"):
        store.clear(partition)
    assert store.size() == 0
    return store


class TestTransferQueueStore(StoreConformance, SharedStoreConformance):
    @pytest.fixture
    def make_store(self, stores: list[Store]) -> MakeStore:
        turn = count()

        def make() -> Store:
            return emptied(stores[next(turn) % 2])

        return make


@pytest.fixture
def store(stores: list[Store]) -> Store:
    first, _ = [emptied(store) for store in stores]
    return first


def long_columns(rows: int) -> dict[str, Column]:
    """Long rows, all of one length, and position ids of 3 axes."""
    tokens = 13_000
    ids = torch.arange(rows * tokens)
    return {
        "response_ids": Ragged.packed(ids, [tokens] * rows),
        "position_ids": Ragged.packed(torch.stack([ids, -ids, 7 * ids], 1), [tokens] * rows),
        "reward": torch.arange(float(rows)),
    }


def blobs_held(handle: TransferQueueHandle) -> int:
    """How many blobs the storage units have, by their own count."""
    manager: Any = client_of(handle.servers, 30.0)._client.storage_manager

    async def count() -> int:
        units = list(manager.storage_unit_infos)
        return sum([(await manager._probe_storage_unit(target_storage_unit=u))["active_keys"] for u in units])

    return client_of(handle.servers, 30.0).call(count(), "count", 30.0)


def kill(actor: Any, by: signal.Signals = signal.SIGKILL) -> None:
    """As the machine would: without a word to Ray."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), by)


def test_bytes_of_another_put_and_damaged_ones_are_reported_apart() -> None:
    uid = b"0123456789abcdef"
    packed = pickle.dumps(pack(make_columns(make_batch(2))))
    blob = torch.frombuffer(bytearray(uid + packed), dtype=torch.uint8)
    assert same(read_blob(uid, blob).unpack(), make_columns(make_batch(2)))
    with pytest.raises(BlobMissing):
        read_blob(uid[::-1], blob)
    with pytest.raises(StoreError, match="damaged"):
        read_blob(uid, blob[:-64])


def test_rows_of_large_puts_come_in_any_order(store: Store) -> None:
    batch, columns = make_batch(24), long_columns(24)
    store.put(batch, columns)
    assert same(store.get(batch, list(columns)), columns)
    some = [17, 3, 4, 5, 23, 0]
    for name, column in store.get(batch.take(some), list(columns)).items():
        assert same([column[i] for i in range(6)], [columns[name][i] for i in some])


def test_blobs_are_freed_when_replaced_refused_or_cleared(store: Store, handle: TransferQueueHandle) -> None:
    batch = make_batch(6)
    assert blobs_held(handle) == 0  # whatever tests before this one did
    store.put(batch, make_columns(batch))
    store.put(batch, make_columns(batch, shift=1))
    with pytest.raises(StoreError, match="values of prompt 5"):
        store.put(batch, {"values": uneven("values", batch)})
    with pytest.raises(StoreError, match="prompt 6"):
        store.put(make_batch(7), make_columns(make_batch(7)), keep_tags=True)
    assert blobs_held(handle) == 1
    store.clear("train", batch.keys[:5])
    assert blobs_held(handle) == 1
    store.clear("train", batch.keys[5:])
    assert blobs_held(handle) == 0


def test_a_blob_that_transferqueue_lost_is_an_error(store: Store, handle: TransferQueueHandle) -> None:
    batch = make_batch(2)
    store.put(batch, make_columns(batch))
    partition: Any = ray.get(handle.servers.controller.get_partition_snapshot.remote("practicum"))
    (name,) = partition.keys_mapping
    client_of(handle.servers, 30.0).clear([name], 30.0)
    with pytest.raises(StoreError, match=f"lost blob {name}"):
        store.get(batch, ["prompt_ids"])


def test_what_another_process_put_is_there_when_that_ended(store: Store, handle: TransferQueueHandle) -> None:
    @ray.remote(num_cpus=0, max_calls=1)
    def put(handle: TransferQueueHandle, batch: BatchRef, columns: dict[str, Column]) -> int:
        handle.connect().put(batch, columns)
        return os.getpid()

    batch, columns = make_batch(3), long_columns(3)
    assert ray.get(put.remote(handle, batch, columns), timeout=PATIENCE) != os.getpid()
    assert same(store.get(batch, list(columns)), columns)


def test_a_cluster_without_room_is_refused(
    handle: TransferQueueHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tq_client, "_ROOM_S", 0.2)
    for units in (5, 8):
        want = f"found transferqueue, whose {units + 1} processes .* free 5 CPUs, of 8 CPUs"
        with pytest.raises(RecipeError, match=rf"runtime\.store: {want}"):
            start_transferqueue(units=units)


def test_what_died_is_named_and_a_closed_store_leaves_the_others(store: Store) -> None:
    # A second set of servers beside those of the other tests, which must not notice.
    batch = make_batch(2)
    store.put(batch, make_columns(batch))
    dying = start_transferqueue()
    broken = dying.connect(20.0)
    broken.put(batch, make_columns(batch))
    kill(dying.actors()["TransferQueue's storage unit 0"])
    for _ in range(2):
        with pytest.raises(StoreError, match="storage unit 0 died; its rows are lost"):
            broken.get(batch, ["prompt_ids"])
    with pytest.raises(StoreError, match="storage unit 0 died"):
        broken.size()
    close_client(dying.servers)
    broken = dying.connect(20.0)
    kill(dying.actors()["TransferQueue's controller"])
    with pytest.raises(StoreError, match="controller died"):
        broken.put(batch, make_columns(batch))
    dying.close()
    dying.close()
    assert same(store.get(batch, ["prompt_ids"]), make_columns(batch, ["prompt_ids"]))


@pytest.mark.parametrize("who", ["controller", "storage unit 1"])
def test_what_hangs_is_named_at_the_deadline(ray_cluster: None, who: str) -> None:
    batch, hung = make_batch(8), start_transferqueue(units=2)
    store = hung.connect(8.0)
    store.put(batch, make_columns(batch))
    kill(hung.actors()[f"TransferQueue's {who}"], signal.SIGSTOP)

    def put_often() -> None:
        for _ in range(8):  # blobs go to the units in turn
            store.put(batch, make_columns(batch))

    with pytest.raises(DeadlineError, match=f"^the store waited 8 s .*; TransferQueue's {who} gave no sign"):
        put_often()
    hung.close()
