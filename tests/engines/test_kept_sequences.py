"""The store of kept sequences, and which of their extensions attend together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.engines.torch.kv_memory import RUN_COST, Extension, PromptKv, blocks
from practicum.engines.torch.prompt_cache import BLOCK, CachedSequence, PromptKey, SequenceCache


def kv_of(length: int) -> PromptKv:
    return PromptKv(torch.ones(2, 1, length, 4), torch.ones(2, 1, length, 4))


sequences = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["put", "use"]), sequences), max_size=40), st.integers(0, 12))
def test_what_is_kept_is_what_a_plain_search_would_keep(calls: list[tuple[str, tuple[int, ...]]], most: int):
    """Against a list from oldest to newest, searched from end to end."""
    store, known = SequenceCache(most), []
    for call, ids in calls:
        if call == "put" and len(ids) <= most:
            claims = next((entry[1] for entry in known if entry[0] == ids), 0)
            known = [entry for entry in known if entry[0] != ids] + [(ids, claims + 1)]
            while sum(len(entry[0]) for entry in known) > most:
                known.pop(0)
        if call == "put":
            store.put(ids, b"", kv_of(len(ids)), None)
        found = store.find(PromptKey(ids))
        best = max(
            (e[0] for e in known if len(e[0]) < len(ids) and e[0] == ids[: len(e[0])]), key=len, default=None
        )
        assert (found.ids if found else None) == best
        if call == "use" and found:
            store.use(found, 1)
            claims = next(entry[1] for entry in known if entry[0] == best)
            known = [entry for entry in known if entry[0] != best] + (
                [(best, claims - 1)] if claims > 1 else []
            )
        assert len(store) == len(known)
        assert store.tokens == sum(len(entry[0]) for entry in known)
        assert store.nbytes == store.tokens * 2 * 2 * 4 * 4


def test_to_use_a_sequence_that_was_forgotten_meanwhile_changes_nothing():
    store = SequenceCache(4)
    store.put((1, 2, 3), b"", kv_of(3), None)
    found = store.find(PromptKey((1, 2, 3, 4)))
    assert isinstance(found, CachedSequence)
    store.put((5, 6, 7), b"", kv_of(3), None)
    store.put((1, 2, 3), b"", kv_of(3), None)
    store.use(found, 1)
    assert store.find(PromptKey((1, 2, 3, 4))) is not None


def test_a_prompt_goes_on_from_its_own_beginning_and_pictures_whatever_the_hash_says():
    prompt = PromptKey((1, 2, 3))
    assert CachedSequence((1, 2), b"", kv_of(2), None, 0).begins(prompt)
    assert not CachedSequence((1, 2), b"a picture", kv_of(2), None, 0).begins(prompt)
    assert not CachedSequence((1, 3), b"", kv_of(2), None, 0).begins(prompt)
    assert not CachedSequence((1, 2, 3), b"", kv_of(3), None, 0).begins(prompt)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 60)), min_size=1))
def test_blocks_are_of_neighbouring_slots_and_pad_little(rows: list[tuple[int, int, int]]):
    slot, extensions = 0, []
    for step, filled, new in rows:
        slot += step
        extensions.append(Extension(slot, filled, new))
    found = blocks(extensions)
    assert [one for block in found for one in block] == extensions
    for block in found:
        assert [one.slot for one in block] == list(range(block[0].slot, block[0].slot + len(block)))
        padded = len(block) * max(one.new for one in block) * max(one.whole for one in block)
        assert padded - sum(one.new * one.whole for one in block) <= RUN_COST * (len(block) - 1)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=80).map(tuple), min_size=1, max_size=6),
    st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple),
    st.integers(1, 80),
)
def test_a_prompt_goes_on_from_the_beginning_of_a_kept_sequence(
    kept: list[tuple[int, ...]], rest: tuple[int, ...], count: int
):
    store = SequenceCache(10_000)
    for ids in kept:
        store.put(ids, b"", PromptKv(torch.rand(2, 1, len(ids), 4), torch.rand(2, 1, len(ids), 4)), None)
    prompt = PromptKey(kept[0][:count] + rest)
    found, held = store.find(prompt), len(store)
    if found is None:
        common = len(kept[0][:count])
        assert common // BLOCK * BLOCK == 0 or 2 * common < len(prompt) or common >= len(prompt)
        return
    assert found.ids == prompt.ids[: len(found)]
    assert len(found) < len(prompt)
    whole = [ids for ids in kept if ids[: len(found)] == found.ids]
    keys = [store.find(PromptKey((*ids, 9))).kv.keys[:, :, : len(found)] for ids in whole]  # pyright: ignore
    assert any(torch.equal(found.kv.keys, x) for x in keys)
    if found.ids not in kept:
        store.use(found, 1)
        assert len(store) == held
