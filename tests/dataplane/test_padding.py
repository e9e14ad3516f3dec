"""Padding rows: minimal, built by the fields table, and readable beside real ones."""

from __future__ import annotations

import pytest
import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import PADDING_PROMPT, padding_batch
from practicum.dataplane.fields import FIELDS, Field, register_field
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Ragged
from practicum.errors import StoreError

from .rows import WIDTH, make_batch, make_columns, same

END = 7
WIDTHS = dict.fromkeys("DKHLE", WIDTH)


def pad(count: int, fields=tuple(FIELDS), **options):
    return padding_batch("train", count, fields, **({"end_id": END, "widths": WIDTHS} | options))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_rule_whose_rows_read_back_beside_real_ones(name):
    store = MemoryStore()
    real = make_batch(3)
    store.put(real, make_columns(real, ["prompt_ids", "response_ids", name]))
    padding, columns = pad(4, ("prompt_ids", "response_ids", name))
    store.put(padding, columns)
    both = store.get(BatchRef.concat([padding.take([3]), real, padding.take([0])]), [name])[name]
    assert len(both) == 5
    assert same(store.get(real, [name]), make_columns(real, [name]))
    assert same(store.get(padding, [name])[name], columns[name])


def test_a_padding_row_is_minimal_and_nothing_of_it_was_sampled():
    _, columns = pad(2, widths={"D": 3, "K": 4, "H": 5, "L": 2, "E": 6})
    for name in ("prompt_ids", "response_ids"):
        assert same(columns[name], Ragged.packed(torch.tensor([END, END]), [1, 1]))
    assert same(columns["response_mask"], Ragged.packed(torch.zeros(2, dtype=torch.bool), [1, 1]))
    assert same(columns["advantages"], Ragged.packed(torch.zeros(2), [1, 1]))
    assert same(columns["reward"], torch.zeros(2))
    assert same(columns["teacher_topk_logprobs"], Ragged.packed(torch.zeros(2, 4), [1, 1]))
    assert same(columns["teacher_hidden"], Ragged.packed(torch.zeros(2, 5), [1, 1]))
    experts = torch.zeros(4, 2, 6, dtype=torch.int64)
    assert same(columns["routed_experts"], Ragged.packed(experts, [2, 2]))
    assert columns["multi_modal_inputs"] == [{}, {}]


def test_rows_have_keys_of_their_own_and_say_that_they_are_padding():
    batch, _ = pad(2, first=5)
    assert batch.keys == (Key(PADDING_PROMPT, 5), Key(PADDING_PROMPT, 6))
    assert set(batch.tags) == {Tags(prompt_tokens=1, response_tokens=1, sampled_tokens=0, is_padding=True)}
    assert not set(batch.keys) & set(make_batch(10).keys)


def test_columns_are_packed_and_rows_share_nothing_that_can_change():
    _, columns = pad(3)
    assert all(column.is_packed for column in columns.values() if isinstance(column, Ragged))
    objects = columns["multi_modal_inputs"]
    assert isinstance(objects, list)
    objects[0]["pixel_values"] = 1
    assert objects[1] == {}


@pytest.mark.parametrize("count", [1, 2])
def test_columns_can_be_looked_at_as_bytes(count: int):
    _, columns = pad(count)
    for column in columns.values():
        values = column.values if isinstance(column, Ragged) else column
        if isinstance(values, torch.Tensor):
            flat = values.view(-1).view(torch.uint8)
            assert flat.numel() == values.numel() * values.element_size()


def test_a_field_without_a_rule_is_refused():
    assert all(field.padding for field in FIELDS.values())
    with pytest.raises(StoreError, match="surprise has no padding rule"):
        register_field(Field("surprise", "float32", "response", "rollout", "new"))
