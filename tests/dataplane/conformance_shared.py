"""The part of the suite about what several threads, or two runs, share: see conformance."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged
from practicum.dataplane.store import Store
from practicum.errors import DeadlineError, StoreError

from .bad_columns import uneven
from .conformance import MakeStore
from .rows import TOKENS, make_batch, make_columns, same
from .threads import PATIENCE, Worker, fast_switching, pause, start_waiting


class SharedStoreConformance:
    """Rules of waiting, of threads and of saving. Uses the fixtures of StoreConformance."""

    # Waiting.

    def test_waiting_for_what_is_there_returns_it_with_its_tags(self, store: Store) -> None:
        batch = make_batch(3)
        store.put(batch, make_columns(batch))
        wanted = batch.take([2, 0])
        got = store.wait("train", wanted.keys, TOKENS, timeout=0, owner="a test")
        assert got == wanted

    def test_a_failed_row_counts_as_arrived(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch.take([0]), make_columns(batch.take([0]), ["reward"]))
        failed = Tags(status="failed", failure="the tool died")
        store.put(BatchRef("train", batch.keys[1:], (failed,)), {})
        got = store.wait("train", batch.keys, ["reward"], timeout=0, owner="a test")
        assert got.tags == (batch.tags[0], failed)

    def test_a_passed_deadline_says_who_waited_for_what(self, store: Store) -> None:
        batch = make_batch(8)
        store.put(batch.take([0, 1]), make_columns(batch.take([0, 1]), ["response_ids"]))
        store.put(batch.take([0]), make_columns(batch.take([0]), ["reward"]))
        with pytest.raises(DeadlineError) as caught:
            store.wait("train", batch.keys, ["response_ids", "reward"], timeout=0.01, owner="the learner")
        message = str(caught.value)
        for part in ("the learner", "0.01 s", "8 rows", "'train'", "7 did not", "and 4 more"):
            assert part in message
        assert f"{batch.keys[1]} lacks reward;" in message
        assert str(batch.keys[2]) in message
        assert str(batch.keys[0]) not in message

    def test_waiting_for_a_row_twice_is_an_error(self, store: Store) -> None:
        with pytest.raises(StoreError, match=r"prompt 1/.*more than once"):
            store.wait("train", [Key(1), Key(1)], ["reward"], timeout=PATIENCE, owner="a test")

    def test_a_put_of_the_last_field_wakes_who_waits(self, store: Store) -> None:
        batch = make_batch(3)
        result = start_waiting(store, batch.keys, ["response_ids", "reward"])
        store.put(batch, make_columns(batch, ["response_ids"]))
        store.put(batch.take([1, 2]), make_columns(batch.take([1, 2]), ["reward"]))
        # The tags of the last put show that the wait did not end before it.
        last = BatchRef("train", batch.keys[:1], (Tags(reward=1.0),))
        store.put(last, make_columns(last, ["reward"]))
        assert result.wait() == BatchRef.concat([last, batch.take([1, 2])])

    def test_tagging_the_last_row_as_failed_wakes_who_waits(self, store: Store) -> None:
        batch = make_batch(2)
        result = start_waiting(store, batch.keys, ["reward"])
        store.put(batch.take([0]), make_columns(batch.take([0]), ["reward"]))
        store.put(batch.take([1]), {})
        pause()
        store.tag("train", {batch.keys[1]: replace(batch.tags[1], status="failed")})
        assert [tags.status for tags in result.wait().tags] == ["ready", "failed"]

    def test_a_row_cleared_while_others_are_awaited_is_awaited_again(self, store: Store) -> None:
        batch = make_batch(2)
        result = start_waiting(store, batch.keys, ["reward"])
        first, second = batch.take([0]), batch.take([1])
        store.put(first, make_columns(first, ["reward"]))
        pause()
        store.clear("train", first.keys)
        store.put(second, make_columns(second, ["reward"]))
        pause()
        store.put(first, make_columns(first, ["reward"]))
        assert result.wait() == batch

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
            got = store.wait("train", batch.keys, list(expected), timeout=PATIENCE, owner="a test")
            for writer in writers:
                writer.wait()
        assert got == batch
        assert same(store.get(batch, list(expected)), expected)

    # Saving.

    def test_what_is_saved_comes_back_exactly(self, make_store: MakeStore, tmp_path: Path) -> None:
        saved, loaded = make_store(), make_store()
        train, evaluation = make_batch(6), make_batch(2, start=4, partition="eval set/1")
        odd = Tags("failed", 1, 2, 3, 4, 5, "ü", "t", "teacher", "stop", 6, 7, 8, 9, 10, 0.5, 1 / 3)
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

    def test_a_load_wakes_who_waits(self, make_store: MakeStore, tmp_path: Path) -> None:
        saved, store, batch = make_store(), make_store(), make_batch(2)
        saved.put(batch, make_columns(batch))
        saved.save(tmp_path)
        result = start_waiting(store, batch.keys, ["response_ids"])
        store.load(tmp_path)
        assert result.wait() == batch
