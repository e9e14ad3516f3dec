"""Attention over packed tokens, in padded blocks: learner and torch engine lay out their sequences here.

A segment is a run of packed tokens that continues another segment, its prefix: segments are a tree. Each of
its tokens sees the prefixes up to the root, and what came before it in its own segment. Segments of like
length are gathered into padded blocks, so the cost is that of attention over short sequences, never [N, N].
Memory grows with the number of tokens. A token's keys lie in the order of its sequence, padded as
`batch_invariance` says: its output is the same bits in any block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from practicum.cpu.batch_invariance import KEY_BLOCK, padded_keys, padded_rows
from practicum.cpu.threaded_attention import scaled_dot_product_attention
from practicum.models import padded_attention
from practicum.models.padded_attention import AttentionRule, PaddedRows
from practicum.models.state_layers import StateLayer, StateRows

QUERY_CHUNK = 128
"""Longer segments of the learner attend in pieces of this many queries, each to no later keys."""
WASTE = 0.3
"""Share of padding in a block's scores from which a block is split."""
FEW_SCORES, MANY_SCORES = 4096, 16_384
"""Padding that is never worth one more block, and padding that always is."""

Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Tensor])


def uncompiled(function: Function) -> Function:
    """Exclude a function from torch.compile: shapes here change with every micro-batch."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class Segments:
    """Where each segment lies in the packed tokens, and which earlier segment is its prefix (-1: none)."""

    starts: Ints
    lengths: Ints
    prefixes: Ints

    def before(self) -> list[Ints]:
        """Return the packed tokens that come before each segment in its sequences."""
        spans = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        tokens = [np.arange(start, start + length) for start, length in spans]
        found: list[Ints] = []
        for prefix in self.prefixes.tolist():
            found.append(np.concatenate([found[prefix], tokens[prefix]]) if prefix >= 0 else self.starts[:0])
        return found


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [B, Q] and their keys [B, J] as packed indices, with padding."""

    query_BQ: Tensor
    key_BJ: Tensor
    rows: PaddedRows
    causal: bool = False
    """True if rows are whole sequences: queries are the first of the keys."""

    def to(self, device: torch.device) -> _Block:
        return _Block(self.query_BQ.to(device), self.key_BJ.to(device), self.rows.to(device), self.causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Return the output [B x Q, heads x D] of the block's queries, padding included."""
        sees_all = rule.window is None or rule.window >= self.rows.keys
        if self.causal and sees_all and not rule.is_written_out:
            indices = ((query, self.query_BQ), (key, self.key_BJ), (value, self.key_BJ))
            q, k, v = (_gather(x, index).transpose(1, 2) for x, index in indices)
            grouped = query.shape[1] != key.shape[1]
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=grouped)
            return out.transpose(1, 2).flatten(0, 1).flatten(1)
        outs = []
        for piece in self._pieces():
            rows, q, k, v = piece.inputs(query, key, value, rule)
            outs.append(padded_attention.attend(rows, q, k, v, rule))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).flatten(0, 1).flatten(1)

    def _pieces(self) -> Iterator[_Block]:
        """Yield the block in pieces of QUERY_CHUNK queries at most, with no more keys than they need."""
        if not self.causal or self.rows.queries <= QUERY_CHUNK:
            yield self
            return
        for start, stop in pairwise([*range(0, self.rows.queries, QUERY_CHUNK), self.rows.queries]):
            keys = min(padded_keys(stop), self.rows.keys)
            rows = self.rows.part(start, stop, keys)
            yield _Block(self.query_BQ[:, start:stop], self.key_BJ[:, :keys], rows)

    def inputs(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> tuple[PaddedRows, Tensor, Tensor, Tensor]:
        """Return rows, queries [B, Q, ...], keys and values [B, kv heads, J, D] for `padded_attention`."""
        skipped, rows = self.rows.within(rule.window)
        k, v = (_gather(x, self.key_BJ[:, skipped:]).transpose(1, 2) for x in (key, value))
        return rows, _gather(query, self.query_BQ), k, v


class _LongBlocks(torch.autograd.Function):
    """Blocks with many keys: writes their outputs into those of the others [N, heads x D]. Saves inputs and
    outputs for the gradient, and gathers blocks again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        out_N: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[_Block],
        rule: AttentionRule,
    ) -> Tensor:
        ctx.blocks, ctx.rule = blocks, rule
        rule = replace(rule, sinks=sinks)
        sums_N = query.new_zeros(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        ctx.has_sums = []
        for block in blocks:
            out, sums = padded_attention.attend_long(*block.inputs(query, key, value, rule), rule)
            real_BQ = block.rows.real_BQ
            tokens = block.query_BQ[real_BQ]
            out_N.index_copy_(0, tokens, out.flatten(2)[real_BQ])
            ctx.has_sums.append(sums is not None)
            if sums is not None:
                sums_N.index_copy_(0, tokens, sums[real_BQ])
        ctx.mark_dirty(out_N)
        ctx.save_for_backward(query, key, value, sinks, out_N, sums_N)
        return out_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out_N, sums_N = ctx.saved_tensors
        rule = replace(ctx.rule, sinks=sinks)
        grad_N, out_N = (x.unflatten(1, (query.shape[1], -1)) for x in (grads[0], out_N))
        rest_N = grads[0].clone() if ctx.needs_input_grad[0] else None
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (query, key, value))
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        for block, has_sums in zip(ctx.blocks, ctx.has_sums, strict=True):
            rows, *inputs = block.inputs(query, key, value, rule)
            real_BQ = block.rows.real_BQ
            padding = ~real_BQ[:, :, None, None]
            grad, out = (_gather(x, block.query_BQ) for x in (grad_N, out_N))
            grad.masked_fill_(padding, 0.0)
            sums = None
            if has_sums:
                # exp(score - inf) is 0: a padded query has no part in the gradient of keys.
                sums = _gather(sums_N, block.query_BQ).masked_fill_(padding[..., 0], float("inf"))
            of_q, of_k, of_v, *of_sinks = padded_attention.backward(
                rows, grad, tuple(inputs), out, sums, rule
            )
            tokens = block.query_BQ[real_BQ]
            grad_q.index_copy_(0, tokens, of_q[real_BQ])
            keys = block.key_BJ[:, -rows.keys :].flatten()
            grad_k.index_add_(0, keys, of_k.transpose(1, 2).flatten(0, 1))
            grad_v.index_add_(0, keys, of_v.transpose(1, 2).flatten(0, 1))
            if grad_sinks is not None:
                grad_sinks += of_sinks[0]
            if rest_N is not None:
                rest_N.index_fill_(0, tokens, 0.0)
        return rest_N, grad_q, grad_k, grad_v, grad_sinks, None, None


class PackedLayout:
    """A `Layout` (models/attention.py) made of padded blocks that together cover all packed tokens."""

    def __init__(self, blocks: Sequence[tuple[_Block, Ints]], segments: Segments) -> None:
        self.segments = segments
        self._state_rows: dict[bool, StateRows] = {}
        self._narrow: dict[int, PackedLayout] = {}
        blocks = sorted(blocks, key=lambda pair: pair[0].rows.is_long)
        self.blocks = [block for block, _ in blocks]
        tokens = np.concatenate([tokens for _, tokens in blocks])
        # Where each packed token's output is among the blocks' padded queries, or 0 if it has none.
        places = np.flatnonzero(tokens >= 0)
        back = np.zeros(segments.lengths.sum(), dtype=np.int64)
        back[tokens[places]] = places
        self.back_N = torch.from_numpy(back)

    @classmethod
    def of_segments(cls, segments: Segments, wanted_M: Ints | None = None) -> PackedLayout:
        """Lay out segments for learning: blocks with little padding, whatever it takes to share one. If some
        tokens alone are wanted (ascending), pieces without one have no output of their own."""
        before = segments.before()
        pieces = _pieces(segments, np.array(list(map(len, before))))
        if wanted_M is not None:
            first, end = (
                wanted_M.searchsorted(pieces.segment_start + x) for x in (pieces.start, pieces.stop)
            )
            pieces = pieces.take(np.flatnonzero(first < end))
        blocks = (pieces.take(np.arange(*cut)) for cut in _cuts(pieces, int(segments.lengths.sum())))
        return cls([_block(x, int(x.queries.max()), int(x.keys.max()), before) for x in blocks], segments)

    @classmethod
    def of_sequences(cls, lengths: Sequence[int]) -> PackedLayout:
        """Lay out whole sequences for sampling. Each is padded to a length that depends on its own alone
        (`padded_length`), so that a sequence's numbers do not depend on its neighbours."""
        ends = np.cumsum(lengths).tolist()
        alike: dict[int, list[tuple[int, ...]]] = {}
        for end, length in zip(ends, lengths, strict=True):
            alike.setdefault(padded_length(length), []).append((end - length, 0, length, 0, 0))
        blocks = []
        for width, rows in alike.items():
            pieces = _Pieces(*np.array(rows, dtype=np.int64).T)
            blocks.append(_block(pieces, width, width, causal=True))
        every = np.array(lengths, dtype=np.int64)
        return cls(blocks, Segments(every.cumsum() - every, every, np.full_like(every, -1)))

    def narrow(self, layer: int, wanted_M: Tensor) -> None:
        """Skip most other tokens' queries in a layer: the last one, where nothing reads their output."""
        if int(self.segments.lengths.max()) > QUERY_CHUNK:
            layout = self.of_segments(self.segments, np.sort(wanted_M.cpu().numpy()))
            self._narrow[layer] = layout.to(self.back_N.device)

    def to(self, device: torch.device) -> PackedLayout:
        moved = object.__new__(type(self))
        moved.blocks = [block.to(device) for block in self.blocks]
        moved.back_N = self.back_N.to(device)
        moved.segments, moved._state_rows, moved._narrow = self.segments, {}, {}
        return moved

    @uncompiled
    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        rows = self._state_rows.get(layer.continues)
        if rows is None:
            rows = StateRows(self.segments, hidden_NH.device, continues=layer.continues)
            self._state_rows[layer.continues] = rows
        return rows.mix(layer, hidden_NH)[0]

    @uncompiled
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        if layer in self._narrow:
            return self._narrow[layer].attend(layer, query, key, value, rule)
        shape = *query.shape[:2], value.shape[-1]
        blocks, long = self.blocks, []
        if torch.is_grad_enabled() and not blocks[0].causal:
            blocks = [block for block in self.blocks if not block.rows.is_long]
            long = self.blocks[len(blocks) :]
        outs = [block.attend(query, key, value, rule) for block in blocks]
        if not long:
            out = outs[0] if len(outs) == 1 else torch.cat(outs)
            return out.index_select(0, self.back_N).view(shape)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        if outs:
            # Tokens of long blocks get any output here, and are overwritten.
            back_N = torch.where(self.back_N < sum(map(len, outs)), self.back_N, 0)
            out_N = torch.cat(outs).index_select(0, back_N)
        else:
            out_N = query.new_zeros(len(query), shape[1] * shape[2])
        plain = replace(rule, sinks=None)
        return _LongBlocks.apply(out_N, query, key, value, rule.sinks, long, plain).view(shape)  # pyright: ignore[reportAttributeAccessIssue]


def padded_length(length: int) -> int:
    """Return the next multiple of 16; above 128, of a step of at most an eighth of the length."""
    step = max(16, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], with a faster backward pass."""
    return x.flatten(1).index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of queries: tokens start..stop of a segment, which also sees `prefix` tokens before it."""

    segment_start: Ints
    start: Ints
    stop: Ints
    segment: Ints
    prefix: Ints

    def take(self, index: Ints) -> _Pieces:
        return _Pieces(*(getattr(self, name)[index] for name in self.__slots__))

    @property
    def queries(self) -> Ints:
        return self.stop - self.start

    @property
    def keys(self) -> Ints:
        return self.prefix + self.stop


def _pieces(segments: Segments, prefix: Ints) -> _Pieces:
    """Cut segments at QUERY_CHUNK; longest runs of queries first, prompts after responses."""
    counts = -(-segments.lengths // QUERY_CHUNK)
    segment = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * QUERY_CHUNK
    pieces = _Pieces(
        segment_start=segments.starts[segment],
        start=start,
        stop=np.minimum(start + QUERY_CHUNK, segments.lengths[segment]),
        segment=segment,
        prefix=prefix[segment],
    )
    return pieces.take(np.lexsort((-pieces.keys, -pieces.queries, pieces.prefix == 0)))


def _cuts(pieces: _Pieces, most_keys: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of pieces that become one block each: little padding, or too little to be worth a block.
    Blocks with many keys gather no more than `most_keys`, unless one piece has more."""
    first = real = queries = keys = 0
    counts = map(padded_rows, pieces.queries.tolist()), map(padded_keys, pieces.keys.tolist())
    for i, (n, seen) in enumerate(zip(*counts, strict=True)):
        wide, rows = (max(queries, n), max(keys, seen)), i + 1 - first
        padded = rows * wide[0] * wide[1]
        waste = padded - real - n * seen
        is_wasteful = waste > max(FEW_SCORES, min(WASTE * padded, MANY_SCORES))
        is_large = wide[1] > KEY_BLOCK and rows * wide[1] > most_keys
        if i > first and (is_wasteful or is_large):
            yield first, i
            first, real, wide = i, 0, (n, seen)
        real += n * seen
        queries, keys = wide
    yield first, len(pieces.start)


def _block(
    pieces: _Pieces, queries: int, keys: int, before: Sequence[Ints] = (), *, causal: bool = False
) -> tuple[_Block, Ints]:
    """Return pieces padded to these widths or more, and the packed token of each query, or -1. `before` are
    the tokens before each segment, if any has some."""
    origin, start, stop, prefix = (
        column[:, None] for column in (pieces.segment_start, pieces.start, pieces.stop, pieces.prefix)
    )
    i_Q, j_J = np.arange(padded_rows(queries)), np.arange(padded_keys(keys))
    real_BQ = i_Q < stop - start
    token_BQ = origin + start + i_Q
    key_BJ = np.where(j_J < prefix + stop, origin + j_J - prefix, origin)
    if before:
        for row_J, segment in zip(key_BJ, pieces.segment.tolist(), strict=True):
            row_J[: len(before[segment])] = before[segment]
    first_B, count_B = (torch.from_numpy(x) for x in (pieces.prefix + pieces.start, pieces.queries))
    block = _Block(
        query_BQ=torch.from_numpy(np.where(real_BQ, token_BQ, origin)),
        key_BJ=torch.from_numpy(key_BJ),
        rows=PaddedRows(first_B, count_B, len(i_Q), len(j_J)),
        causal=causal,
    )
    return block, np.where(real_BQ, token_BQ, -1).reshape(-1)
