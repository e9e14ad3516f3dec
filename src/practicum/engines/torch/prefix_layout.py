"""Sequences that begin alike: each distinct prefix is computed once, and its continuations attend to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.engines.torch.kv_memory import CausalLayout, padded_length


@dataclass(frozen=True, slots=True)
class _Block:
    """Continuations of one padded shape: places of their queries and of the keys before them."""

    query_bQ: Tensor
    key_bK: Tensor
    mask_b1QK: Tensor
    real_M: Tensor
    """Which of the padded queries are real."""
    token_M: Tensor
    """Their places among the packed tokens."""


class PrefixLayout:
    """Packed prefixes, then continuations, each attending to its prefix and causally to itself.

    Both are padded to lengths that depend on their own alone, so that a sequence's numbers do not depend on
    its neighbours. `continuations` are pairs of the prefix's number and a length above 0.
    """

    def __init__(
        self, prefixes: Sequence[int], continuations: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self._causal = CausalLayout(prefixes, device)
        self._prefix_tokens = sum(prefixes)
        starts = [0, *torch.tensor(prefixes).cumsum(0).tolist()]
        by_shape: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        place = self._prefix_tokens
        for number, length in continuations:
            shape = padded_length(prefixes[number]), padded_length(length)
            row = (starts[number], prefixes[number], place, length)
            by_shape.setdefault(shape, []).append(row)
            place += length
        self._blocks = [_block(shape, rows, device) for shape, rows in by_shape.items()]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of packed tokens; see `models.attention.Layout`."""
        first = slice(0, self._prefix_tokens)
        out = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
        out[first] = self._causal.attend(layer, query[first], key[first], value[first], scale)
        for block in self._blocks:
            k, v = (x[block.key_bK].transpose(1, 2) for x in (key, value))
            padded = attend_padded(query[block.query_bQ], k, v, block.mask_b1QK, scale)
            out[block.token_M] = padded[block.real_M]
        return out


def _block(shape: tuple[int, int], rows: Sequence[tuple[int, int, int, int]], device: torch.device) -> _Block:
    prefix_start, prefix, start, length = (
        torch.tensor(column).unsqueeze(1) for column in zip(*rows, strict=True)
    )
    p_P, q_Q = torch.arange(shape[0]), torch.arange(shape[1])
    real_bQ, sees_bP = q_Q < length, p_P < prefix
    query_bQ = torch.where(real_bQ, start + q_Q, start)
    key_bK = torch.cat([torch.where(sees_bP, prefix_start + p_P, prefix_start), query_bQ], dim=1)
    causal_QQ = q_Q.unsqueeze(1) >= q_Q
    b, queries = query_bQ.shape
    mask_bQK = torch.cat(
        [sees_bP.unsqueeze(1).expand(b, queries, -1), causal_QQ.expand(b, queries, queries)], dim=2
    )
    return _Block(
        query_bQ.to(device),
        key_bK.to(device),
        mask_bQK.unsqueeze(1).to(device),
        real_bQ.flatten().nonzero().squeeze(1).to(device),
        query_bQ[real_bQ].to(device),
    )


def attend_padded(query_bQ: Tensor, k: Tensor, v: Tensor, mask_b1QK: Tensor, scale: float) -> Tensor:
    """Attention of padded rows, queries [b, Q, heads, D] and keys [b, kv heads, K, D]: [b x Q, heads, D]."""
    queries, kv_heads = query_bQ.shape[1], k.shape[1]
    group = query_bQ.shape[2] // kv_heads
    # Heads that share keys become further queries, so keys and values are never repeated.
    q = query_bQ.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = mask_b1QK if group == 1 else mask_b1QK.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = out.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.flatten(0, 1)
