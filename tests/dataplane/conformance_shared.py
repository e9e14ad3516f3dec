"""The part of the suite about what several threads, or two runs, share: see conformance."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Tags
from practicum.dataplane.ragged import Ragged
from practicum.dataplane.store import Store
from practicum.errors import StoreError

from .bad_columns import uneven
from .conformance import MakeStore
from .rows import TOKENS, make_batch, make_columns, same
from .threads import Worker, fast_switching


class SharedStoreConformance:
    """Rules of threads and of saving. Uses the fixtures of StoreConformance."""

    # Threads.

    def test_a_put_is_seen_whole_or_not_at_all(self, store: Store) -> None:
        batch, rounds = make_batch(400), 100
        finished, torn, reads = threading.Event(), [], [0]

        def write(version: float) -> None:
            values = Ragged.packed(torch.full((len(batch),), version), [1] * len(batch))
            store.put(batch, {"reward": torch.full((len(batch),), version), "values": values})

        def read() -> None:
            while not finished.is_set():
                got = store.get(batch, ["reward", "values"])
                rewards, values = got["reward"], got["values"]
                assert isinstance(rewards, torch.Tensor)
                assert isinstance(values, Ragged)
                versions = torch.cat([rewards, values.values]).unique().tolist()
                reads[0] += 1
                if len(versions) > 1:
                    torn.append(versions)

        write(0.0)
        with fast_switching():
            readers = [Worker(read) for _ in range(2)]
            for version in range(rounds):
                write(float(version))
            finished.set()
            for reader in readers:
                reader.wait()
        assert reads[0]
        assert not torn

    def test_puts_of_many_threads_all_arrive(self, store: Store) -> None:
        batch = make_batch(40)

        def write(start: int) -> None:
            for i in range(start, 40, 4):
                row = batch.take([i])
                store.put(row, make_columns(row, ["response_ids"]))
                store.put(row, make_columns(row, ["reward"]))

        expected = make_columns(batch, ["response_ids", "reward"])
        with fast_switching():
            writers = [Worker(write, start) for start in range(4)]
            for writer in writers:
                writer.wait()
        assert store.batch("train", batch.keys) == batch
        assert same(store.get(batch, list(expected)), expected)

    # Saving.

    def test_what_is_saved_comes_back_exactly(self, make_store: MakeStore, tmp_path: Path) -> None:
        saved, loaded = make_store(), make_store()
        train, evaluation = make_batch(6), make_batch(2, start=4, partition="eval set/1")
        odd = Tags(
            "failed",
            1,
            2,
            3,
            4,
            5,
            6,
            "ü",
            "t",
            "teacher",
            "stop",
            7,
            8,
            9,
            10,
            0.25,
            11,
            {"chat": 1},
            ("a", "b"),
            0.5,
            1 / 3,
        )
        odd = replace(odd, is_baseline=True, is_padding=True, failure="why\n")
        train = BatchRef("train", train.keys, (odd, *train.tags[1:]))
        store_names = list(FIELDS)
        saved.put(train, make_columns(train, store_names))
        saved.put(evaluation, make_columns(evaluation, ["reward"]))
        narrow = Ragged.packed(torch.full((4, 1), torch.nan), [4])
        saved.put(evaluation.take([0]), {"teacher_topk_logprobs": narrow})
        other = make_batch(1, start=50)
        loaded.put(other, make_columns(other))
        saved.save(tmp_path / "store")
        loaded.load(tmp_path / "store")
        assert loaded.size() == 8
        assert loaded.batch("train") == train
        assert loaded.batch("eval set/1") == evaluation
        assert same(loaded.get(train, store_names), make_columns(train, store_names))
        assert same(loaded.get(evaluation, ["reward"]), make_columns(evaluation, ["reward"]))
        topk = loaded.get(evaluation.take([0]), ["teacher_topk_logprobs"])["teacher_topk_logprobs"]
        assert isinstance(topk, Ragged)
        assert topk.lengths == [4]
        assert topk.values.isnan().all()
        with pytest.raises(StoreError, match="response_ids"):
            loaded.get(evaluation, ["response_ids"])

    def test_a_loaded_store_goes_on_as_the_saved_one(self, make_store: MakeStore, tmp_path: Path) -> None:
        saved, loaded, batch = make_store(), make_store(), make_batch(4)
        saved.put(batch, make_columns(batch))
        saved.save(tmp_path)
        loaded.load(tmp_path)
        with pytest.raises(StoreError, match="values of prompt 3"):
            loaded.put(batch, {"values": uneven("values", batch)})
        loaded.put(batch, make_columns(batch, ["values"]))
        loaded.save(tmp_path)
        saved.load(tmp_path)
        assert same(saved.get(batch, [*TOKENS, "values"]), make_columns(batch, [*TOKENS, "values"]))

    def test_an_empty_store_comes_back_empty(self, make_store: MakeStore, tmp_path: Path) -> None:
        saved, loaded = make_store(), make_store()
        batch = make_batch(2)
        loaded.put(batch, {})
        saved.save(tmp_path / "a" / "b")
        loaded.load(tmp_path / "a" / "b")
        assert loaded.size() == 0
        assert len(loaded.batch("train")) == 0

    def test_loading_what_nobody_saved_is_an_error(self, store: Store, tmp_path: Path) -> None:
        batch = make_batch(1)
        store.put(batch, {})
        with pytest.raises(StoreError, match=str(tmp_path)):
            store.load(tmp_path)
        assert store.batch("train") == batch
