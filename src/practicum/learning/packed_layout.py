"""Attention over packed segments: a token sees its segment's prefix and what came before it there.

A prompt is a segment without prefix, a response has its prompt as prefix. Segments of like length are
gathered into padded blocks, so the cost is that of attention over short sequences, never [N, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_CHUNK = 512
"""Longer segments attend in pieces of this many queries, each to no later keys."""
WASTE = 0.3
"""Share of padding in a block's scores from which a block is split."""
FEW_SCORES, MANY_SCORES = 4096, 65_536
"""Padding that is never worth one more block, and padding that always is."""

Ints = NDArray[np.int64]


Function = TypeVar("Function", bound=Callable[..., Tensor])


def _uncompiled(function: Function) -> Function:
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
    """Queries [b, Q] and their keys [b, K] as packed indices, with padding; what each query may see."""

    query_bQ: Tensor
    key_bK: Tensor
    mask_b1QK: Tensor
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> _Block:
        return _Block(self.query_bQ.to(device), self.key_bK.to(device), self.mask_b1QK.to(device))

    def mask(self, group: int, dtype: torch.dtype) -> Tensor:
        """Additive mask for queries of `group` heads folded into the query axis, made once."""
        if (group, dtype) not in self.masks:
            folded = self.mask_b1QK.repeat(1, 1, group, 1)
            zeros = torch.zeros(folded.shape, dtype=dtype, device=folded.device)
            self.masks[group, dtype] = zeros.masked_fill_(~folded, float("-inf"))
        return self.masks[group, dtype]


class SharedPromptLayout:
    """A `Layout` (models/attention.py) for segments that share prefixes."""

    def __init__(self, segments: Segments) -> None:
        pieces = _pieces(segments)
        blocks = [_block(pieces.take(np.arange(*cut))) for cut in _cuts(pieces)]
        self.blocks = [block for block, _ in blocks]
        tokens = np.concatenate([tokens for _, tokens in blocks])
        # Where each packed token's output is among the blocks' padded queries.
        back = np.empty(int(segments.lengths.sum()), dtype=np.int64)
        places = np.flatnonzero(tokens >= 0)
        back[tokens[places]] = places
        self.back_N = torch.from_numpy(back)

    def to(self, device: torch.device) -> SharedPromptLayout:
        """The same layout on another device."""
        moved = object.__new__(SharedPromptLayout)
        moved.blocks = [block.to(device) for block in self.blocks]
        moved.back_N = self.back_N.to(device)
        return moved

    @_uncompiled
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [N, heads, D], key and value [N, kv heads, D] → output [N, heads, D]."""
        outs = [_attend(block, query, key, value, scale) for block in self.blocks]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, self.back_N).view(*query.shape[:2], value.shape[-1])


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of queries: own tokens start..stop of a segment, which also sees `prefix` tokens of another."""

    origin: Ints
    start: Ints
    stop: Ints
    prefix_origin: Ints
    prefix: Ints

    def take(self, index: Ints) -> _Pieces:
        return _Pieces(*(getattr(self, name)[index] for name in self.__slots__))


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
    order = np.lexsort((-pieces.prefix, -pieces.stop, pieces.start - pieces.stop, ~has_prefix[segment]))
    return pieces.take(order)


def _cuts(pieces: _Pieces) -> Iterator[tuple[int, int]]:
    """Ranges of pieces that become one block each: little padding, or too little to be worth a block."""
    first = real = queries = keys = prefix = 0
    columns = (pieces.stop - pieces.start, pieces.stop, pieces.prefix)
    for i, (n, stop, before) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        area = n * (stop + before)
        wide = max(queries, n), max(keys, stop), max(prefix, before)
        padded = (i + 1 - first) * wide[0] * (wide[1] + wide[2])
        waste = padded - real - area
        if i > first and waste > max(FEW_SCORES, min(WASTE * padded, MANY_SCORES)):
            yield first, i
            first, real, wide = i, 0, (n, stop, before)
        real += area
        queries, keys, prefix = wide
    yield first, len(pieces.start)


def _block(pieces: _Pieces) -> tuple[_Block, Ints]:
    """The padded block of these pieces, and the packed token of each of its queries (-1: padding)."""
    origin, start, stop = pieces.origin[:, None], pieces.start[:, None], pieces.stop[:, None]
    i_Q = np.arange((stop - start).max())
    j_K = np.arange(stop.max())
    p_P = np.arange(pieces.prefix.max())
    real_bQ = i_Q < stop - start
    token_bQ = origin + start + i_Q
    own_bK = np.where(j_K < stop, origin + j_K, origin)
    sees_prefix_bP = p_P < pieces.prefix[:, None]
    prefix_bP = np.where(sees_prefix_bP, pieces.prefix_origin[:, None] + p_P, origin)
    sees_own_bQK = j_K <= (start + i_Q)[:, :, None]
    sees_bQK = np.concatenate(
        [np.broadcast_to(sees_prefix_bP[:, None], (*real_bQ.shape, len(p_P))), sees_own_bQK], axis=2
    )
    block = _Block(
        query_bQ=torch.from_numpy(np.where(real_bQ, token_bQ, origin)),
        key_bK=torch.from_numpy(np.concatenate([prefix_bP, own_bK], axis=1)),
        mask_b1QK=torch.from_numpy(sees_bQK).unsqueeze(1),
    )
    return block, np.where(real_bQ, token_bQ, -1).reshape(-1)


def _attend(block: _Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Output [b*Q, heads*D] of the block's queries, padding included."""
    (b, n_queries), (_, heads, _), kv_heads = block.query_bQ.shape, query.shape, key.shape[1]
    group = heads // kv_heads

    def gather(x: Tensor, index: Tensor) -> Tensor:
        return x.flatten(1).index_select(0, index.view(-1)).view(*index.shape, *x.shape[1:])

    # Heads that share keys become further queries, so keys and values are never repeated.
    q = gather(query, block.query_bQ).unflatten(2, (kv_heads, group))
    q = q.permute(0, 2, 3, 1, 4).reshape(b, kv_heads, group * n_queries, -1)
    k, v = (gather(x, block.key_bK).transpose(1, 2) for x in (key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask=block.mask(group, q.dtype), scale=scale)
    out = out.unflatten(2, (group, n_queries)).permute(0, 3, 1, 2, 4)
    return out.reshape(b * n_queries, -1)
