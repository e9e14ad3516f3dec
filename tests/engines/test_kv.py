"""KV memory and the layouts, against attention written out for one query at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.cpu.batch_invariance import padded_keys
from practicum.engines.protocol import Counter
from practicum.engines.torch import kv_memory as kv
from practicum.engines.torch import shared_pages
from practicum.engines.torch.kv_memory import (
    DecodeLayout,
    KvMemory,
    PrefillLayout,
    PromptKv,
    lazy_zeros,
    runs,
)
from practicum.models import packed_attention
from practicum.models.packed_attention import PackedLayout, padded_length
from practicum.models.padded_attention import AttentionRule
from tests.engines.engines import engine_of, generate, prompts, resident, sampling, tiny

HEADS, KV_HEADS, WIDTH = 6, 2, 5
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """query [heads, D], keys and values [L, kv heads, D]."""
    out = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        weights = torch.softmax(scale * keys[:, shared] @ query[head], 0)
        out.append(weights @ values[:, shared])
    return torch.stack(out)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=8))
def test_packed_sequences_attend_causally_to_themselves(lengths: list[int]):
    total = sum(lengths)
    query = random(total, HEADS, WIDTH)
    key, value = random(total, KV_HEADS, WIDTH, seed=1), random(total, KV_HEADS, WIDTH, seed=2)
    layout = PrefillLayout(lengths, CPU)
    out = layout.attend(0, query, key, value, AttentionRule(0.3))
    start = 0
    for length, prompt in zip(lengths, layout.prompts(), strict=True):
        assert torch.equal(prompt.keys[0].transpose(0, 1), key[start : start + length])
        assert torch.equal(prompt.values[0].transpose(0, 1), value[start : start + length])
        for i in {start, start + length // 2, start + length - 1}:
            expected = attend_one(query[i], key[start : i + 1], value[start : i + 1], 0.3)
            torch.testing.assert_close(out[i], expected, rtol=0, atol=1e-12)
        start += length


def test_sequences_of_unlike_length_are_not_padded_to_one_another(monkeypatch):
    padded = []
    real = packed_attention.scaled_dot_product_attention

    def counting(query, *args, **kwargs):
        padded.append(query.shape[0] * query.shape[2])
        return real(query, *args, **kwargs)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", counting)
    lengths = [1000, 10, 12, 9, 11, 990]
    x = random(sum(lengths), HEADS, WIDTH)
    PackedLayout.of_sequences(lengths).attend(0, x, x, x, AttentionRule(1.0))
    assert sum(padded) < 1.05 * sum(lengths)


@given(st.integers(1, 100_000))
def test_a_padded_length_is_little_more_than_the_length(length: int):
    assert length <= padded_length(length) < length + max(16, length / 8 + 1)


@pytest.mark.parametrize("run_cost", [0, 4, 512])
def test_decoding_attends_to_the_slot_and_the_new_token(run_cost: int, monkeypatch):
    monkeypatch.setattr(kv, "RUN_COST", run_cost)
    lengths = [3, 1, 9, 9, 2, 8]
    memory = KvMemory(PromptKv(random(2, KV_HEADS, 1, WIDTH), random(2, KV_HEADS, 1, WIDTH)), 8, 16)
    for slot, length in enumerate(lengths):
        part = [random(2, KV_HEADS, length, WIDTH, seed=10 * slot + i) for i in range(2)]
        memory.put_prompt(PromptKv(part[0], part[1]), slot, 1)
    query = random(6, HEADS, WIDTH)
    key, value = random(6, KV_HEADS, WIDTH, seed=1), random(6, KV_HEADS, WIDTH, seed=2)
    out = DecodeLayout(memory, torch.tensor(lengths)).attend(1, query, key, value, AttentionRule(0.7))
    for slot, length in enumerate(lengths):
        keys = memory.keys[1, slot, :, : length + 1].transpose(0, 1)
        values = memory.values[1, slot, :, : length + 1].transpose(0, 1)
        assert torch.equal(keys[-1], key[slot])
        assert torch.equal(values[-1], value[slot])
        expected = attend_one(query[slot], keys, values, 0.7)
        torch.testing.assert_close(out[slot], expected, rtol=0, atol=1e-12)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_runs_cover_the_slots_and_pad_little(lengths: list[int]):
    found = runs(lengths)
    assert [first for first, _, _ in found] == [0, *(end for _, end, _ in found[:-1])]
    assert found[-1][1] == len(lengths)
    for first, end, longest in found:
        assert longest == padded_keys(max(lengths[first:end]) + 1)
        padding = sum(longest - padded_keys(length + 1) for length in lengths[first:end])
        assert padding <= kv.RUN_COST * (end - first)


def test_a_prompt_is_copied_into_each_of_its_slots_and_moves():
    prompt = PromptKv(random(2, KV_HEADS, 4, WIDTH), random(2, KV_HEADS, 4, WIDTH, seed=1))
    memory = KvMemory(prompt, 6, 10)
    memory.put_prompt(prompt, 2, 3)
    memory.move(4, 0, 4)
    for slot in (0, 2, 3, 4):
        assert torch.equal(memory.keys[:, slot, :, :4], prompt.keys)
        assert torch.equal(memory.values[:, slot, :, :4], prompt.values)
    for slot in (1, 5):
        assert not memory.keys[:, slot].any()


def test_memory_grows_with_the_longest_sequence_and_keeps_what_it_holds(monkeypatch):
    monkeypatch.setattr(kv, "KV_POSITIONS", 16)
    memory = KvMemory(PromptKv(random(2, KV_HEADS, 1, WIDTH), random(2, KV_HEADS, 1, WIDTH)), 32, 4096)
    full = 2 * 2 * 32 * KV_HEADS * 4096 * WIDTH * 8
    assert memory.nbytes < full / 100
    short, long = (
        PromptKv(random(2, KV_HEADS, length, WIDTH), random(2, KV_HEADS, length, WIDTH, seed=1))
        for length in (9, 1000)
    )
    memory.put_prompt(short, 0, 30)
    # Two of them are left when one becomes long: the others' slots are given up for its length.
    memory.move(29, 1, 9)
    memory.reserve(2, 1000)
    memory.put_prompt(long, 2, 1)
    assert memory.keys.shape[1] < 8
    assert memory.nbytes < full / 10
    # They end, and all slots are needed again: for short sequences.
    for slot in range(32):
        memory.put_prompt(short, slot, 1)
        assert torch.equal(memory.prompt(0, 9).keys, short.keys)
    assert memory.keys.shape[1] == 32
    assert torch.equal(memory.prompt(31, 9).values, short.values)
    assert memory.nbytes < full / 10


def test_answers_are_the_same_bits_while_memory_grows(monkeypatch):
    requests = [
        (ids, sampling(60 if i == 2 else 3 * i + 1), Counter(0, i)) for i, ids in enumerate(prompts(9))
    ]
    made = []
    for positions in (256, 16):
        monkeypatch.setattr(kv, "KV_POSITIONS", positions)
        with engine_of(tiny(), slots=6) as engine:
            made.append(generate(engine, requests))
            memory = engine.scheduler.memory
            assert memory is not None
            assert memory.keys.shape[3] >= 60
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kv_memory_is_zero_aligned_and_untouched(dtype: torch.dtype):
    zeros = lazy_zeros((3, 5, 7), torch.empty(0, dtype=dtype))
    assert zeros.dtype == dtype
    assert zeros.shape == (3, 5, 7)
    assert zeros.data_ptr() % 64 == 0
    assert not zeros.any()
    before = resident()
    large = lazy_zeros((1 << 26,), torch.empty(0, dtype=dtype))
    assert resident() - before < large.nbytes // 4


@pytest.mark.skipif(sys.platform != "linux", reason="pages are shared on Linux alone")
def test_slots_that_split_share_the_pages_of_what_they_have_in_common():
    prompt, other = (
        PromptKv(torch.randn(2, KV_HEADS, length, 64), torch.randn(2, KV_HEADS, length, 64))
        for length in (520, 300)
    )
    memory = KvMemory(prompt, 6, 4096)
    memory.reserve(4, 520)
    memory.put_prompt(prompt, 0, 1)
    memory.move(0, 1, 520, split=True)
    memory.move(1, 3, 520)  # from a slot that has them already
    assert [mapped(memory, slot) for slot in range(4)] == [True, True, False, True]
    # Each is written to on its own, also where pages are shared.
    memory.keys[:, 1, :, 520] = 1.0
    memory.keys[:, 3, :, 5] = 2.0
    assert torch.equal(memory.prompt(0, 520).keys, prompt.keys)
    assert torch.equal(memory.prompt(1, 520).keys, prompt.keys)
    assert not memory.keys[:, 0, :, 520].any()
    for slot in (0, 1, 3):
        assert torch.equal(memory.prompt(slot, 520).values, prompt.values)
    memory.reserve(4, 900)
    assert [mapped(memory, slot) for slot in range(4)] == [True, True, False, True]
    memory.put_prompt(other, 1, 1)
    memory.move(1, 2, 300)  # nobody goes on in the first: a plain copy
    for slot in (1, 2):
        assert torch.equal(memory.prompt(slot, 300).keys, other.keys)
    for slot in (0, 3):
        assert torch.equal(memory.prompt(slot, 520).values, prompt.values)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are shared on Linux alone")
def test_answers_are_the_same_bits_with_and_without_shared_pages(monkeypatch):
    asked = prompts(2, shortest=820, longest=830)
    requests = [(asked[i % 2], sampling(2 + i), Counter(0, i % 2, i)) for i in range(8)]
    made = []
    for least in (0, 1 << 30):
        monkeypatch.setattr(shared_pages, "LEAST_BYTES", least)
        with engine_of(tiny(context=1024), slots=6, context=1024) as engine:
            made.append(generate(engine, requests))
            memory = engine.scheduler.memory
            assert memory is not None
            assert bool(memory._pages) == (least == 0)
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprobs, other.logprobs)


def mapped(memory: KvMemory, slot: int) -> bool:
    """Return True if the slot's beginning is pages of a file in all layers."""
    starts = [x[layer, slot].data_ptr() for x in (memory.keys, memory.values) for layer in range(2)]
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = [[int(x, 16) for x in line.split()[0].split("-")] for line in lines if "memfd:kv" in line]
    found = {any(start <= place < end for start, end in files) for place in starts}
    assert len(found) == 1
    return found.pop()
