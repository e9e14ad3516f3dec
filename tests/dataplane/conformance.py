"""The suite that every Store passes; what concerns threads and disks is in conformance_shared.

A store plugs in with a test file beside this one that gives the suite a way to make empty stores:

    class TestMemoryStore(StoreConformance, SharedStoreConformance):
        @pytest.fixture
        def make_store(self):
            return MemoryStore

A store with servers behind it starts them in a fixture of wider scope, yields a function that
returns a fresh, empty store, and closes what it made. All stores of one test must be independent of
each other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged
from practicum.dataplane.store import Store
from practicum.errors import StoreError

from .bad_columns import BAD_COLUMNS, ONE, uneven
from .rows import TOKENS, make_batch, make_column, make_columns, make_value, same

MakeStore = Callable[[], Store]


class StoreConformance:
    """Rules of the Store protocol, one test for each."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError("a test of a store overrides this fixture")

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Store:
        return make_store()

    # What is put is what is got.

    @pytest.mark.parametrize("name", FIELDS)
    def test_a_field_comes_back_as_it_was_put(self, store: Store, name: str) -> None:
        batch = make_batch(6)
        store.put(batch, {name: make_column(name, batch)})
        assert same(store.get(batch, [name]), {name: make_column(name, batch)})

    def test_only_the_fields_asked_for_come_in_the_order_asked(self, store: Store) -> None:
        batch = make_batch(3)
        store.put(batch, make_columns(batch))
        assert list(store.get(batch, ["response_mask", "prompt_ids"])) == ["response_mask", "prompt_ids"]

    @pytest.mark.parametrize("name", ["response_ids", "reward", "teacher_topk_ids", "multi_modal_inputs"])
    def test_rows_of_several_puts_come_in_the_order_of_the_batch(self, store: Store, name: str) -> None:
        for start in (0, 3, 6):
            batch = make_batch(3, start=start)
            store.put(batch, {name: make_column(name, batch)})
        wanted = make_batch(9).take([8, 0, 4, 3, 1])
        assert same(store.get(wanted, [name])[name], make_column(name, wanted))

    def test_packed_and_single_rows_mix(self, store: Store) -> None:
        packed, single = make_batch(3), make_batch(3, start=3)
        column = make_column("response_ids", packed)
        assert isinstance(column, Ragged)
        store.put(packed, {"response_ids": Ragged.packed(column.values, column.lengths)})
        store.put(single, {"response_ids": make_column("response_ids", single)})
        wanted = make_batch(6).take([5, 1, 4, 2])
        expected = make_column("response_ids", wanted)
        assert same(store.get(wanted, ["response_ids"])["response_ids"], expected)

    def test_a_second_put_adds_columns_and_replaces_the_same_one(self, store: Store) -> None:
        batch = make_batch(4)
        store.put(batch, make_columns(batch))
        store.put(batch, make_columns(batch, ["rollout_logprobs", "reward"], shift=5))
        expected = make_columns(batch) | make_columns(batch, ["rollout_logprobs", "reward"], shift=5)
        assert same(store.get(batch, list(expected)), expected)

    def test_a_put_of_some_rows_leaves_the_others(self, store: Store) -> None:
        batch = make_batch(4)
        store.put(batch, make_columns(batch, ["reward"]))
        store.put(batch.take([2]), make_columns(batch.take([2]), ["reward"], shift=9))
        got = store.get(batch, ["reward"])["reward"]
        assert same(got, torch.tensor([0.0, 100.0, 209.0, 300.0]))

    def test_an_empty_batch_has_empty_columns(self, store: Store) -> None:
        empty = make_batch(2).take([])
        store.put(empty, {"reward": torch.zeros(0), "multi_modal_inputs": []})
        assert store.size() == 0
        got = store.get(empty, ["response_ids", "teacher_topk_logprobs", "reward", "multi_modal_inputs"])
        assert [len(column) for column in got.values()] == [0, 0, 0, 0]

    def test_partitions_are_apart(self, store: Store) -> None:
        train, evaluation = make_batch(2), make_batch(2, partition="eval")
        store.put(train, make_columns(train, ["reward"]))
        store.put(evaluation, make_columns(evaluation, ["reward"], shift=1))
        assert same(store.get(train, ["reward"]), make_columns(train, ["reward"]))
        store.clear("train")
        assert same(store.get(evaluation, ["reward"]), make_columns(evaluation, ["reward"], shift=1))

    @given(data=st.data())
    @settings(
        max_examples=25,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )
    def test_any_order_of_puts_and_clears_leaves_what_a_dict_would(
        self, make_store: MakeStore, data: st.DataObject
    ) -> None:
        store, model = make_store(), dict[Key, dict[str, int]]()
        everything, names = make_batch(5), ("response_ids", "reward", "multi_modal_inputs")
        indices = st.lists(st.integers(0, 4), unique=True, min_size=1)
        for shift in range(data.draw(st.integers(1, 6))):
            batch = everything.take(data.draw(indices))
            if data.draw(st.booleans()):
                fields = data.draw(st.lists(st.sampled_from(names), unique=True))
                store.put(batch, make_columns(batch, fields, shift))
                for key in batch.keys:
                    model.setdefault(key, {}).update(dict.fromkeys(fields, shift))
            else:
                held = batch.where(lambda key, _: key in model)
                store.clear("train", held.keys)
                for key in held.keys:
                    del model[key]
        assert store.batch("train").keys == tuple(model)
        for name in names:
            has = everything.where(lambda key, _, name=name: name in model.get(key, {}))
            got = store.get(has, [name])[name]
            for i, key in enumerate(has.keys):
                assert same(got[i], make_value(name, key, model[key][name]))

    # What is wrong is an error that names it, and changes nothing.

    @pytest.mark.parametrize("case", BAD_COLUMNS)
    def test_a_column_that_does_not_fit_its_field_is_refused(self, store: Store, case: str) -> None:
        columns, message = BAD_COLUMNS[case]
        with pytest.raises(StoreError, match=message):
            store.put(ONE, {"response_ids": Ragged.packed(torch.arange(2), [2]), **columns})
        assert store.size() == 0

    @pytest.mark.parametrize(
        ("names", "wrong", "message"),
        [
            (["response_ids"], "values", "values of prompt 3.* has 4 .*response_ids.* 3"),
            (["response_mask"], "teacher_topk_ids", "teacher_topk_ids of prompt 3.* has 4 .* 3"),
            (["prompt_ids", "response_ids"], "position_ids", "position_ids of prompt 3.* has 8 .* 4.* 3"),
            (["position_ids", "response_ids"], "prompt_ids", "position_ids of prompt 3.* has 7 .* 5.* 3"),
        ],
    )
    @pytest.mark.parametrize("together", [True, False])
    def test_columns_that_disagree_in_length_are_refused(
        self, store: Store, names: list[str], wrong: str, message: str, together: bool
    ) -> None:
        batch = make_batch(4)
        columns, bad = make_columns(batch, names), {wrong: uneven(wrong, batch)}
        if not together:
            store.put(batch, columns)
        with pytest.raises(StoreError, match=message):
            store.put(batch, columns | bad if together else bad)
        assert store.size() == (0 if together else 4)
        with pytest.raises(StoreError):
            store.get(batch, [wrong])

    def test_a_length_changes_only_with_every_column_of_it(self, store: Store) -> None:
        batch = make_batch(4)
        store.put(batch, make_columns(batch, ["response_ids", "rollout_logprobs"]))
        longer = {name: uneven(name, batch) for name in ("response_ids", "rollout_logprobs")}
        with pytest.raises(StoreError, match="rollout_logprobs, which is held"):
            store.put(batch, {"response_ids": longer["response_ids"]})
        store.put(batch, longer)
        assert same(store.get(batch, list(longer)), longer)
        with pytest.raises(StoreError, match="values of prompt 3"):
            store.put(batch, {"values": make_column("values", batch)})

    def test_a_put_that_fails_changes_nothing(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch, make_columns(batch))
        wider = make_batch(4)
        wider = BatchRef("train", wider.keys, tuple(Tags(domain="new") for _ in wider.keys))
        # Row 1 of the four does not fit: those before and after it must not be written either.
        columns = make_columns(wider, ["rollout_logprobs"], shift=1)
        tokens = columns["rollout_logprobs"]
        assert isinstance(tokens, Ragged)
        rows = [tokens[0], torch.zeros(9), tokens[2], tokens[3]]
        with pytest.raises(StoreError, match="rollout_logprobs of prompt 1"):
            store.put(wider, {"rollout_logprobs": Ragged.from_rows(rows)})
        assert store.batch("train") == batch
        assert same(store.get(batch, TOKENS), make_columns(batch))

    def test_a_missing_row_is_named(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch, make_columns(batch))
        with pytest.raises(StoreError, match=r"'train'.*prompt 2/session 0/trajectory 2"):
            store.get(make_batch(3), ["prompt_ids"])
        with pytest.raises(StoreError, match=r"'eval'.*prompt 0/session 0/trajectory 0"):
            store.get(make_batch(1, partition="eval"), ["prompt_ids"])
        with pytest.raises(StoreError, match=r"prompt 2/session 0/trajectory 2"):
            store.batch("train", [*batch.keys, Key(2, 0, 2)])

    def test_a_missing_field_is_named_with_the_rows_that_lack_it(self, store: Store) -> None:
        batch = make_batch(4)
        store.put(batch, make_columns(batch))
        store.put(batch.take([0, 2]), make_columns(batch.take([0, 2]), ["values"]))
        with pytest.raises(StoreError, match=r"^values .*2 of 4 .*prompt 1/.*prompt 3/") as caught:
            store.get(batch, ["prompt_ids", "values"])
        assert "prompt 0/" not in str(caught.value)
        with pytest.raises(StoreError, match=r"^advantages .*4 of 4"):
            store.get(batch, ["advantages"])

    def test_an_unknown_field_is_named_with_the_nearest(self, store: Store) -> None:
        with pytest.raises(StoreError, match=r"'reponse_ids'.*'response_ids'"):
            store.get(make_batch(0), ["reponse_ids"])

    def test_widths_that_differ_between_rows_are_refused_together(self, store: Store) -> None:
        batch = make_batch(5).take([3, 4])
        wide = Ragged.packed(torch.zeros(3, 2), [3])
        store.put(batch.take([0]), {"teacher_topk_logprobs": wide})
        store.put(batch.take([1]), {"teacher_topk_logprobs": Ragged.packed(torch.zeros(4, 5), [4])})
        assert same(store.get(batch.take([0]), ["teacher_topk_logprobs"]), {"teacher_topk_logprobs": wide})
        with pytest.raises(StoreError, match="teacher_topk_logprobs"):
            store.get(batch, ["teacher_topk_logprobs"])

    # Tags.

    def test_a_put_replaces_tags(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch, {})
        assert store.batch("train") == batch
        late = BatchRef("train", batch.keys, (Tags(reward=1.0), Tags(reward=2.0)))
        store.put(late, make_columns(batch, ["reward"]))
        assert store.batch("train") == late

    def test_keep_tags_writes_columns_only_and_only_to_rows_that_exist(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch, {})
        store.tag("train", {batch.keys[0]: Tags(reward=1.0)})
        store.put(batch, make_columns(batch, ["reward"]), keep_tags=True)
        assert store.batch("train").tags == (Tags(reward=1.0), batch.tags[1])
        assert same(store.get(batch, ["reward"]), make_columns(batch, ["reward"]))
        wider = make_batch(3)
        with pytest.raises(StoreError, match="prompt 2/"):
            store.put(wider, make_columns(wider, ["reward"], shift=1), keep_tags=True)
        assert same(store.get(batch, ["reward"]), make_columns(batch, ["reward"]))
        assert store.size() == 2

    def test_tag_replaces_tags_of_rows_that_exist(self, store: Store) -> None:
        batch = make_batch(3)
        store.put(batch, {})
        store.tag("train", {batch.keys[1]: Tags(teacher="t")})
        assert store.batch("train").tags == (batch.tags[0], Tags(teacher="t"), batch.tags[2])
        with pytest.raises(StoreError, match="prompt 99/"):
            store.tag("train", {batch.keys[0]: Tags(), Key(99): Tags()})
        assert store.batch("train").tags[0] == batch.tags[0]

    def test_batch_lists_rows_in_order_of_first_put_or_as_asked(self, store: Store) -> None:
        batch = make_batch(4)
        for rows in ([2], [0, 3], [2, 1]):
            store.put(batch.take(rows), make_columns(batch.take(rows), ["reward"]))
        assert store.batch("train") == batch.take([2, 0, 3, 1])
        assert store.batch("train", batch.keys[1:3]) == batch.take([1, 2])
        assert len(store.batch("absent")) == 0

    # Clearing.

    def test_cleared_rows_are_gone(self, store: Store) -> None:
        batch, other = make_batch(4), make_batch(1, partition="eval")
        store.put(batch, make_columns(batch))
        store.put(other, make_columns(other))
        store.clear("train", batch.keys[:3])
        assert (store.size(), store.size("train"), store.size("eval")) == (2, 1, 1)
        assert store.batch("train") == batch.take([3])
        with pytest.raises(StoreError, match="prompt 1/"):
            store.get(batch.take([1]), ["prompt_ids"])
        store.clear("train")
        store.clear("eval", other.keys)
        assert (store.size(), store.size("absent")) == (0, 0)

    def test_a_row_put_again_after_a_clear_is_new(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch, make_columns(batch))
        store.clear("train", batch.keys)
        store.put(batch, {"response_ids": uneven("response_ids", batch)})
        with pytest.raises(StoreError, match="prompt_ids"):
            store.get(batch, ["prompt_ids"])

    def test_clearing_a_row_that_is_not_there_is_an_error(self, store: Store) -> None:
        batch = make_batch(2)
        store.put(batch, {})
        with pytest.raises(StoreError, match="prompt 2/"):
            store.clear("train", make_batch(3).keys)
        assert store.size() == 2
        store.clear("absent")
