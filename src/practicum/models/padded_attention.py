"""Attention of padded rows: consecutive tokens of sequences, to the keys from each sequence's start on.

Up to KEY_BLOCK keys, rows have a mask, made once for all layers. With more keys it would grow with the square
of the length, so the CPU's kernel takes them (`cpu/long_attention.py`). Other devices, soft caps and sinks
take few queries at a time, and compute their weights once more for the gradient. Whatever the way, keys lie
in the order of their sequence, so a token's output is the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from practicum.cpu import long_attention
from practicum.cpu.batch_invariance import KEY_BLOCK, ROWS
from practicum.cpu.threaded_attention import scaled_dot_product_attention

SCORES_AT_ONCE = 2**24
"""Maximum attention scores in memory, for devices without a fused kernel."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Attention settings of a layer."""

    scale: float
    window: int | None = None
    """Window size including the token itself, or None for full attention."""
    softcap: float | None = None
    """Soft cap of the scores."""
    sinks: Tensor | None = None
    """Scores [heads] of a key that takes weight and has no value."""

    @property
    def is_written_out(self) -> bool:
        """True if no fused kernel supports it."""
        return self.softcap is not None or self.sinks is not None


@dataclass(slots=True)
class PaddedRows:
    """B rows of consecutive queries: where they stand in their sequences, of which the keys are the first."""

    first_B: Tensor
    """The place of each row's first query."""
    count_B: Tensor
    """How many of each row's queries are real."""
    queries: int
    keys: int
    """Both with padding; padded keys come after all that a real query sees."""
    _masks: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)
    _within: dict[int, tuple[int, PaddedRows]] = field(default_factory=dict)

    def to(self, device: torch.device) -> PaddedRows:
        return PaddedRows(self.first_B.to(device), self.count_B.to(device), self.queries, self.keys)

    @property
    def real_BQ(self) -> Tensor:
        """True for queries that are not padding."""
        return torch.arange(self.queries, device=self.count_B.device) < self.count_B.unsqueeze(1)

    @property
    def is_long(self) -> bool:
        """True if masks would take too much memory to be kept."""
        return self.keys > KEY_BLOCK

    def part(self, start: int, stop: int, keys: int) -> PaddedRows:
        """Return some of the queries of each row, with the first keys."""
        count_B = (self.count_B - start).clamp(0, stop - start)
        return PaddedRows(self.first_B + start, count_B, stop - start, keys)

    def parts(self, heads: int) -> Iterator[tuple[slice, PaddedRows]]:
        """Yield as many queries at a time as SCORES_AT_ONCE allows."""
        step = max(ROWS, SCORES_AT_ONCE // (len(self.first_B) * heads * self.keys) // ROWS * ROWS)
        if step >= self.queries:
            yield slice(None), self
            return
        for start in range(0, self.queries, step):
            stop = min(start + step, self.queries)
            yield slice(start, stop), self.part(start, stop, self.keys)

    def within(self, window: int | None) -> tuple[int, PaddedRows]:
        """Return how many of the first keys no query's window reaches, and the rows without these. Whole
        blocks of the kernel's: those it would find nothing in, so that the bits stay the same."""
        if window is None or window >= self.keys:
            return 0, self
        if window not in self._within:
            start = max(0, int(self.first_B.min()) - window + 1) // KEY_BLOCK * KEY_BLOCK
            less = PaddedRows(self.first_B - start, self.count_B, self.queries, self.keys - start)
            self._within[window] = start, less if start else self
        return self._within[window]

    def mask(self, dtype: torch.dtype, window: int | None, group: int = 1) -> Tensor:
        """Return what is added to scores [B, 1, group x queries, keys]."""
        name = group, dtype, window
        if name in self._masks:
            return self._masks[name]
        device = self.first_B.device
        # Padded queries see what the last real one does: a query that sees nothing would give NaN.
        last_B1 = (self.count_B - 1).clamp(0).unsqueeze(1)
        i_BQ = torch.minimum(torch.arange(self.queries, device=device), last_B1)
        place_BQ1 = (self.first_B.unsqueeze(1) + i_BQ).unsqueeze(2)
        place_J = torch.arange(self.keys, device=device)
        hidden_BQJ = place_J > place_BQ1
        if window is not None:
            hidden_BQJ |= place_J <= place_BQ1 - window
        mask_BQJ = torch.zeros(hidden_BQJ.shape, dtype=dtype, device=device)
        mask = mask_BQJ.masked_fill_(hidden_BQJ, float("-inf")).unsqueeze(1).repeat(1, 1, group, 1)
        if not self.is_long:
            self._masks[name] = mask
        return mask


def attend(rows: PaddedRows, query: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Return the output [B, Q, heads, D] of queries [B, Q, heads, D] to k and v [B, kv heads, J, D]. Autograd
    can go through it, except for long rows."""
    if _has_kernel(rows, query, v, rule):
        return attend_long(rows, query, k, v, rule)[0]
    if not rows.is_long and not rule.is_written_out:
        return _dense(rows, query, k, v, rule)
    parts = [_dense(part, query[:, where], k, v, rule) for where, part in rows.parts(query.shape[2])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def attend_long(
    rows: PaddedRows, query: Tensor, k: Tensor, v: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor | None]:
    """Return what `attend` does, and what `backward` needs, [B, Q, heads] or None."""
    if _has_kernel(rows, query, v, rule):
        return long_attention.attend(rows.first_B, query, k, v, rule.scale, rule.window)
    return attend(rows, query, k, v, rule), None


def backward(
    rows: PaddedRows,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sums: Tensor | None,
    rule: AttentionRule,
) -> list[Tensor]:
    """Return gradients of query, k, v and optional sinks from the gradient of `attend_long`'s output."""
    if sums is not None:
        return long_attention.backward(rows.first_B, grad, inputs, (out, sums), rule.scale, rule.window)
    query, *shared = inputs if rule.sinks is None else (*inputs, rule.sinks)
    grad_q, totals = torch.empty_like(query), [torch.zeros_like(x) for x in shared]
    for where, part in rows.parts(query.shape[2]):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (query[:, where], *shared)]
            again = rule if rule.sinks is None else replace(rule, sinks=leaves[3])
            part_out = _dense(part, leaves[0], leaves[1], leaves[2], again)
        grad_q[:, where], *grads = torch.autograd.grad(part_out, leaves, grad[:, where])
        for total, more in zip(totals, grads, strict=True):
            total += more
    return [grad_q, *totals]


def _has_kernel(rows: PaddedRows, query: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    return rows.is_long and not rule.is_written_out and long_attention.can_attend(query, v)


def _dense(rows: PaddedRows, query: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Attend with a mask. Heads that share keys become further queries, so keys are never repeated."""
    group = query.shape[2] // k.shape[1]
    q = query.unflatten(2, (k.shape[1], group)).permute(0, 2, 3, 1, 4)
    if rule.is_written_out:
        out = written_out(q, k, v, rows.mask(query.dtype, rule.window).unsqueeze(1), rule)
    else:
        mask = rows.mask(query.dtype, rule.window, group)
        out = scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=rule.scale)
        out = out.unflatten(2, (group, rows.queries))
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """Attend from [B, kv heads, group, Q, D] to [B, kv heads, J, D], with soft cap and sinks."""
    kv_heads, group = q.shape[1:3]
    scores = q.flatten(2, 3) @ k.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    # A padding query may see no key at all: with -inf everywhere, its gradient would be NaN.
    scores = (scores.unflatten(2, (group, -1)) + mask).clamp(min=torch.finfo(scores.dtype).min)
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return (weights[..., : k.shape[2]].flatten(2, 3) @ v).unflatten(2, (group, -1))
