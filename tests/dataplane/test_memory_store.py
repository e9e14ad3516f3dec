"""The memory store: the rules of every store, and that nothing is copied."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Ragged
from practicum.dataplane.store import Store
from practicum.errors import StoreError

from .conformance import MakeStore, StoreConformance
from .conformance_shared import SharedStoreConformance
from .rows import make_batch, make_columns, response_tokens, same


class TestMemoryStore(StoreConformance, SharedStoreConformance):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore


BATCH = make_batch(6)
LENGTHS = [response_tokens(key) for key in BATCH.keys]


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def values() -> Tensor:
    return torch.arange(sum(LENGTHS))


def get_ids(store: Store, rows: list[int]) -> Ragged:
    column = store.get(BATCH.take(rows), ["response_ids"])["response_ids"]
    assert isinstance(column, Ragged)
    return column


def shares(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def test_a_packed_column_comes_back_in_the_same_memory(store: Store, values: Tensor) -> None:
    store.put(BATCH, {"response_ids": Ragged.packed(values, LENGTHS)})
    got = get_ids(store, list(range(6)))
    assert got.values.data_ptr() == values.data_ptr()
    assert got.values.shape == values.shape


def test_rows_in_any_order_are_views_of_what_was_put(store: Store, values: Tensor) -> None:
    store.put(BATCH, {"response_ids": Ragged.packed(values, LENGTHS)})
    got = get_ids(store, [4, 1, 3])
    assert all(shares(row, values) for row in got.rows)
    assert [row.tolist() for row in got.rows] == [values.split(LENGTHS)[i].tolist() for i in (4, 1, 3)]


def test_scalars_are_views_where_they_are_neighbours(store: Store) -> None:
    rewards = torch.arange(6.0)
    store.put(BATCH, {"reward": rewards})
    got = store.get(BATCH.take([1, 2, 3]), ["reward"])["reward"]
    assert isinstance(got, Tensor)
    assert got.data_ptr() == rewards[1:].data_ptr()


def test_objects_are_handed_out_as_they_are(store: Store) -> None:
    objects = [{"row": i} for i in range(6)]
    store.put(BATCH, {"multi_modal_inputs": objects})
    got = store.get(BATCH.take([5, 0]), ["multi_modal_inputs"])["multi_modal_inputs"]
    assert got[0] is objects[5]
    assert got[1] is objects[0]


def test_clearing_a_row_frees_it_though_others_of_its_put_stay(store: Store) -> None:
    rows = [torch.arange(n) for n in LENGTHS]
    images = [{"pixels": torch.zeros(2)} for _ in LENGTHS]
    alive = [weakref.ref(rows[1]), weakref.ref(images[1]["pixels"])]
    store.put(BATCH, {"response_ids": Ragged.from_rows(rows), "multi_modal_inputs": images})
    del rows, images
    assert all(ref() is not None for ref in alive)
    store.clear("train", [BATCH.keys[1]])
    assert all(ref() is None for ref in alive)
    assert get_ids(store, [0, 2]).lengths == [LENGTHS[0], LENGTHS[2]]


def test_a_save_that_is_cut_short_leaves_the_earlier_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(BATCH, make_columns(BATCH))
    store.save(tmp_path)
    store.put(BATCH, make_columns(BATCH, shift=1))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(tmp_path)
    loaded = MemoryStore()
    loaded.load(tmp_path)
    assert same(loaded.get(BATCH, ["response_ids"]), make_columns(BATCH, ["response_ids"]))
    store.save(tmp_path)
    loaded.load(tmp_path)
    assert same(loaded.get(BATCH, ["response_ids"]), make_columns(BATCH, ["response_ids"], shift=1))


def test_saving_few_rows_of_a_big_put_writes_few_bytes(store: Store, tmp_path: Path) -> None:
    batch = make_batch(2)
    store.put(batch, {"values": Ragged.packed(torch.zeros(1_000_001), [1, 1_000_000])})
    store.clear("train", batch.keys[1:])
    store.save(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000


def test_a_damaged_save_is_an_error_that_names_the_folder(store: Store, tmp_path: Path) -> None:
    store.put(BATCH, make_columns(BATCH))
    store.save(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(StoreError, match=str(tmp_path)):
        store.load(tmp_path)
    assert store.size() == 6
