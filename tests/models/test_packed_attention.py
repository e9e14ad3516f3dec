"""Attention in padded blocks equals attention under one dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from practicum.cpu.batch_invariance import padded_keys, padded_rows
from practicum.models import packed_attention as layout_module
from practicum.models import padded_attention
from practicum.models.packed_attention import PackedLayout, Segments
from practicum.models.padded_attention import AttentionRule


def segments_of(prompts, responses):
    """Prompts by length; continuations by (earlier segment, length)."""
    lengths = np.array([*prompts, *(length for _, length in responses)], dtype=np.int64)
    prefixes = np.array([*([-1] * len(prompts)), *(prompt for prompt, _ in responses)], dtype=np.int64)
    return Segments(lengths.cumsum() - lengths, lengths, prefixes)


def dense_mask(segments, window=None):
    """[N, N]: what each packed token may see, token by token."""
    total = int(segments.lengths.sum())
    sees = torch.zeros(total, total, dtype=torch.bool)
    for start, length, prefix in zip(segments.starts, segments.lengths, segments.prefixes, strict=True):
        for i in range(start, start + length):
            sees[i, start : i + 1] = True
            above = prefix
            while above >= 0:
                first = segments.starts[above]
                sees[i, first : first + segments.lengths[above]] = True
                above = segments.prefixes[above]
            seen = sees[i].nonzero().squeeze(1)  # prefixes lie before what continues them
            sees[i, seen[: -window or None] if window and len(seen) > window else seen[:0]] = False
    return sees


def dense_attention(segments, query, key, value, rule):
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    scores = query.transpose(0, 1) @ k.transpose(1, 2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~dense_mask(segments, rule.window), float("-inf"))
    if rule.sinks is None:
        return (scores.softmax(-1) @ v).transpose(0, 1)
    total = torch.logaddexp(scores.logsumexp(-1), rule.sinks.unsqueeze(1))
    return ((scores - total.unsqueeze(2)).exp() @ v).transpose(0, 1)


def tensors(total, heads, kv_heads, seed, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(total, n, 4, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(heads), draw(kv_heads), draw(kv_heads)


@settings(max_examples=100)
@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    responses=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 15)), max_size=12),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (4, 1)]),
    chunk=st.sampled_from([1, 3, 8, 1024]),
    few_scores=st.sampled_from([0, 50, 10**9]),
    mask_keys=st.sampled_from([4, 16, 512]),
    window=st.sampled_from([None, 1, 3, 10]),
    softcap=st.sampled_from([None, None, 0.7]),
    has_sinks=st.sampled_from([False, False, True]),
    on_cpu=st.booleans(),
)
def test_output_and_gradients_equal_dense_attention(
    prompts, responses, heads, chunk, few_scores, mask_keys, window, softcap, has_sinks, on_cpu
):
    count = len(prompts)
    segments = segments_of(prompts, [(p % (count + i), n) for i, (p, n) in enumerate(responses)])
    inputs = tensors(int(segments.lengths.sum()), *heads, seed=len(responses))
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64).requires_grad_() if has_sinks else None
    rule = AttentionRule(0.3, window, softcap, sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "QUERY_CHUNK", chunk)
        patch.setattr(layout_module, "FEW_SCORES", few_scores)
        patch.setattr(layout_module, "KEY_BLOCK", mask_keys)
        patch.setattr(padded_attention, "KEY_BLOCK", mask_keys)
        patch.setattr(padded_attention, "SCORES_AT_ONCE", 20 * mask_keys)
        if not on_cpu:  # other devices have no kernel for long rows
            patch.setattr(padded_attention, "_has_kernel", lambda *_: False)
        mine = PackedLayout.of_segments(segments).attend(0, *inputs, rule)
        weights = torch.randn(mine.shape, dtype=mine.dtype, generator=torch.Generator().manual_seed(0))
        leaves = inputs if sinks is None else (*inputs, sinks)
        found = torch.autograd.grad((mine * weights).sum(), leaves)
    theirs = dense_attention(segments, *inputs, rule)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad((theirs * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_lower_precisions(dtype, tolerance):
    segments = segments_of([5, 3], [(0, 7), (0, 2), (1, 9)])
    inputs = tensors(26, 4, 2, seed=0, dtype=dtype)
    mine = PackedLayout.of_segments(segments).attend(0, *inputs, AttentionRule(0.5))
    assert mine.dtype == dtype
    query, key, value = (x.double() for x in inputs)
    theirs = dense_attention(segments, query, key, value, AttentionRule(0.5))
    torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", [None, 300])
def test_a_narrow_layer_has_the_same_bits_where_they_are_wanted(window, monkeypatch):
    monkeypatch.setattr(layout_module, "QUERY_CHUNK", 64)
    segments = segments_of([600, 30], [(0, 40), (0, 70), (1, 200), (0, 7)])
    inputs = tensors(int(segments.lengths.sum()), 4, 2, seed=0, dtype=torch.float32)
    wanted_M = torch.cat([torch.arange(599, 600), torch.arange(630, len(inputs[0]))])
    results = []
    for narrow in (False, True):
        layout, rule = PackedLayout.of_segments(segments), AttentionRule(0.3, window)
        if narrow:
            layout.narrow(3, wanted_M)
            assert torch.equal(layout.attend(2, *inputs, rule)[wanted_M], results[0][0])
        out = layout.attend(3, *inputs, rule)
        assert out.isfinite().all()
        grads = torch.autograd.grad(out[wanted_M].square().sum(), inputs)
        queries = sum(map(scores_of, (layout._narrow.get(3) or layout).blocks))
        results.append((out[wanted_M], grads, queries))
    (out, grads, queries), (narrow_out, narrow_grads, narrow_queries) = results
    assert torch.equal(out, narrow_out)
    assert narrow_queries < 0.6 * queries
    for a, b in zip(grads, narrow_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(a.abs().max()))


def scores_of(block) -> int:
    return len(block.rows.first_B) * block.rows.queries * block.rows.keys


def test_a_long_response_attends_in_pieces_and_does_not_pad_the_short_ones():
    layout = PackedLayout.of_segments(segments_of([10], [(0, 3000), *[(0, 10)] * 50]))
    assert max(block.rows.queries for block in layout.blocks) == layout_module.QUERY_CHUNK
    scores = sum(map(scores_of, layout.blocks))
    causal, short = 3000 * 3000 // 2 + 3000 * 10, 50 * 10 * 20 + 10 * 10
    assert scores < 1.25 * causal + 2 * short


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=60),
)
def test_padding_of_each_block_is_bounded(prompts, responses):
    segments = segments_of(prompts, [(p % len(prompts), n) for p, n in responses])
    lengths = segments.lengths
    prefix = np.where(segments.prefixes >= 0, lengths[segments.prefixes], 0)
    keys = (lengths + prefix).tolist()
    real = sum(padded_rows(n) * padded_keys(seen) for n, seen in zip(lengths.tolist(), keys, strict=True))
    layout = PackedLayout.of_segments(segments)
    padded = sum(map(scores_of, layout.blocks))
    allowed = layout_module.FEW_SCORES * len(layout.blocks)
    assert padded <= real / (1 - layout_module.WASTE) + allowed
