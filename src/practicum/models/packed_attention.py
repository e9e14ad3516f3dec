"""Attention over packed tokens, in padded blocks: learner and torch engine lay out their sequences here.

A segment is a run of packed tokens. Each of its tokens sees the segment's prefix, which is another segment,
and what came before it in its own. Segments of like length are gathered into padded blocks, so the cost is
that of attention over short sequences, never [N, N]. A token's keys lie in the order of its sequence, padded
as `batch_invariance` says: its output is the same bits in any block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.models.batch_invariance import padded_keys, padded_rows

QUERY_CHUNK = 512
"""Longer segments of the learner attend in pieces of this many queries, each to no later keys."""
WASTE = 0.3
"""Share of padding in a block's scores from which a block is split."""
FEW_SCORES, MANY_SCORES = 4096, 65_536
"""Padding that is never worth one more block, and padding that always is."""

Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Tensor])


def uncompiled(function: Function) -> Function:
    """Left out of torch.compile: shapes here change with every micro-batch."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class Segments:
    """Where each segment lies in the packed tokens, and which segment is its prefix (-1: none)."""

    starts: Ints
    lengths: Ints
    prefixes: Ints


@dataclass(slots=True)
class _Block:
    """Queries [B, Q] and their keys [B, J] as packed indices, with padding; what each query may see.

    Without `sees_B1QJ`, queries are the first of the keys and attention is causal.
    """

    query_BQ: Tensor
    key_BJ: Tensor
    sees_B1QJ: Tensor | None
    keeps_mask: bool
    """Whether the additive mask is made once for all layers: it takes memory."""
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> _Block:
        sees = None if self.sees_B1QJ is None else self.sees_B1QJ.to(device)
        return _Block(self.query_BQ.to(device), self.key_BJ.to(device), sees, self.keeps_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Output [B x Q, heads x D] of the block's queries, padding included."""
        q, k, v = (
            _gather(x, index)
            for x, index in ((query, self.query_BQ), (key, self.key_BJ), (value, self.key_BJ))
        )
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.sees_B1QJ is not None:
            group = query.shape[1] // key.shape[1]
            return attend_folded(q, k, v, self._mask(self.sees_B1QJ, group, q.dtype), scale).flatten(1)
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _mask(self, sees_B1QJ: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """For queries of `group` heads folded into the query axis."""
        if not self.keeps_mask:
            return fold_mask(sees_B1QJ, group)
        if (group, dtype) not in self.masks:
            folded = fold_mask(sees_B1QJ, group)
            zeros = torch.zeros(folded.shape, dtype=dtype, device=folded.device)
            self.masks[group, dtype] = zeros.masked_fill_(~folded, float("-inf"))
        return self.masks[group, dtype]


class PackedLayout:
    """A `Layout` (models/attention.py) made of padded blocks that together cover all packed tokens."""

    def __init__(self, blocks: Sequence[tuple[_Block, Ints]]) -> None:
        self.blocks = [block for block, _ in blocks]
        tokens = np.concatenate([tokens for _, tokens in blocks])
        # Where each packed token's output is among the blocks' padded queries.
        places = np.flatnonzero(tokens >= 0)
        back = np.empty(len(places), dtype=np.int64)
        back[tokens[places]] = places
        self.back_N = torch.from_numpy(back)

    @classmethod
    def of_segments(cls, segments: Segments) -> PackedLayout:
        """For learning: blocks with little padding, whatever it takes to share one."""
        pieces = _pieces(segments)
        blocks = (pieces.take(np.arange(*cut)) for cut in _cuts(pieces))
        return cls([_block(block, *block.widths(), keeps_mask=True) for block in blocks])

    @classmethod
    def of_sequences(
        cls, lengths: Sequence[int], continuations: Sequence[tuple[int, int]] = ()
    ) -> PackedLayout:
        """For sampling and scoring: sequences, then continuations, which are pairs of the number of the
        sequence that they continue and a length above 0.

        Both are padded to lengths that depend on their own alone (`padded_length`), so that a sequence's
        numbers do not depend on its neighbours.
        """
        ends = np.cumsum(lengths).tolist()
        causal: dict[int, list[tuple[int, ...]]] = {}
        for end, length in zip(ends, lengths, strict=True):
            causal.setdefault(padded_length(length), []).append((end - length, 0, length, 0, 0))
        masked: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        start = ends[-1]
        for number, length in continuations:
            before = lengths[number]
            shape = padded_length(length), padded_length(before + length)
            masked.setdefault(shape, []).append((start, 0, length, ends[number] - before, before))
            start += length
        return cls(
            [_block(_Pieces.of(rows), width, width, masked=False) for width, rows in causal.items()]
            + [_block(_Pieces.of(rows), own, whole) for (own, whole), rows in masked.items()]
        )

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout on another device."""
        moved = object.__new__(type(self))
        moved.blocks = [block.to(device) for block in self.blocks]
        moved.back_N = self.back_N.to(device)
        return moved

    @uncompiled
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [N, heads, D], key and value [N, kv heads, D] → output [N, heads, D]."""
        outs = [block.attend(query, key, value, scale) for block in self.blocks]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, self.back_N).view(*query.shape[:2], value.shape[-1])


def padded_length(length: int) -> int:
    """The next multiple of 16; above 128, of a step that grows with the length (an eighth of it at most)."""
    step = max(16, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


def fold_mask(sees_B1QJ: Tensor, group: int) -> Tensor:
    """What queries of `group` heads see that are folded into the query axis."""
    return sees_B1QJ if group == 1 else sees_B1QJ.repeat(1, 1, group, 1)


def attend_folded(query_BQ: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of padded rows, queries [B, Q, heads, D] and keys [B, kv heads, J, D]: [B x Q, heads, D].

    Heads that share keys become further queries, so keys and values are never repeated; so does the mask.
    """
    queries, kv_heads = query_BQ.shape[1], k.shape[1]
    group = query_BQ.shape[2] // kv_heads
    q = query_BQ.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = out.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.flatten(0, 1)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x[index], with a backward pass that is faster."""
    return x.flatten(1).index_select(0, index.view(-1)).view(*index.shape, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of queries: own tokens start..stop of a segment, which also sees `prefix` tokens of another."""

    origin: Ints
    start: Ints
    stop: Ints
    prefix_origin: Ints
    prefix: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> _Pieces:
        return cls(*np.array(rows, dtype=np.int64).T)

    def take(self, index: Ints) -> _Pieces:
        return _Pieces(*(getattr(self, name)[index] for name in self.__slots__))

    @property
    def queries(self) -> Ints:
        return self.stop - self.start

    @property
    def keys(self) -> Ints:
        return self.prefix + self.stop

    def widths(self) -> tuple[int, int]:
        """Most queries and keys."""
        return int(self.queries.max()), int(self.keys.max())


def _pieces(segments: Segments) -> _Pieces:
    """Segments, cut at QUERY_CHUNK; longest runs of queries first, prompts after responses."""
    counts = -(-segments.lengths // QUERY_CHUNK)
    segment = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * QUERY_CHUNK
    has_prefix = segments.prefixes >= 0
    prefix = np.where(has_prefix, segments.lengths[segments.prefixes], 0)
    pieces = _Pieces(
        origin=segments.starts[segment],
        start=start,
        stop=np.minimum(start + QUERY_CHUNK, segments.lengths[segment]),
        prefix_origin=np.where(has_prefix, segments.starts[segments.prefixes], 0)[segment],
        prefix=prefix[segment],
    )
    order = np.lexsort((-pieces.keys, -pieces.queries, ~has_prefix[segment]))
    return pieces.take(order)


def _cuts(pieces: _Pieces) -> Iterator[tuple[int, int]]:
    """Ranges of pieces that become one block each: little padding, or too little to be worth a block."""
    first = real = queries = keys = 0
    widths = zip(
        map(padded_rows, pieces.queries.tolist()), map(padded_keys, pieces.keys.tolist()), strict=True
    )
    for i, (n, seen) in enumerate(widths):
        wide = max(queries, n), max(keys, seen)
        padded = (i + 1 - first) * wide[0] * wide[1]
        waste = padded - real - n * seen
        if i > first and waste > max(FEW_SCORES, min(WASTE * padded, MANY_SCORES)):
            yield first, i
            first, real, wide = i, 0, (n, seen)
        real += n * seen
        queries, keys = wide
    yield first, len(pieces.start)


def _block(
    pieces: _Pieces, queries: int, keys: int, *, masked: bool = True, keeps_mask: bool = False
) -> tuple[_Block, Ints]:
    """Pieces padded to these widths or more, and the packed token of each of the block's queries, or -1."""
    origin, start, stop, prefix = (
        column[:, None] for column in (pieces.origin, pieces.start, pieces.stop, pieces.prefix)
    )
    i_Q, j_J = np.arange(padded_rows(queries)), np.arange(padded_keys(keys))
    real_BQ = i_Q < stop - start
    token_BQ = origin + start + i_Q
    own_BJ = np.where(j_J < prefix + stop, origin + j_J - prefix, origin)
    key_BJ = np.where(j_J < prefix, pieces.prefix_origin[:, None] + j_J, own_BJ)
    sees = None
    if masked:
        sees = torch.from_numpy(j_J <= (prefix + start + i_Q)[:, :, None]).unsqueeze(1)
    block = _Block(
        query_BQ=torch.from_numpy(np.where(real_BQ, token_BQ, origin)),
        key_BJ=torch.from_numpy(key_BJ),
        sees_B1QJ=sees,
        keeps_mask=keeps_mask,
    )
    return block, np.where(real_BQ, token_BQ, -1).reshape(-1)
