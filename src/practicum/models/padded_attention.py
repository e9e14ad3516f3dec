"""Attention of padded rows: consecutive tokens of sequences, to the keys from each sequence's start on.

Up to KEY_BLOCK keys, rows have a mask, made once for all layers. With more keys it would grow with the square
of the length. But what a token sees depends on its distance to a key alone, so all rows of a mask are parts
of one line: the CPU's kernel reads that line, one place further for each query. Other devices, soft caps and
sinks take few queries at a time, and compute their weights once more for the gradient. Whatever the way, keys
lie in the order of their sequence, so a token's output is the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.models.batch_invariance import KEY_BLOCK, ROWS

SCORES_AT_ONCE = 2**24
"""Products of queries and keys that are held at once where the kernel does not do without holding them."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer weighs keys."""

    scale: float
    window: int | None = None
    """How many tokens a token sees, itself and those before it; None: all."""
    softcap: float | None = None
    """Scores approach this number, and its negative, but don't pass them."""
    sinks: Tensor | None = None
    """Scores [heads] of a key that takes weight and has no value."""

    @property
    def is_written_out(self) -> bool:
        """Whether no kernel knows it."""
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
        """The same rows on another device."""
        return PaddedRows(self.first_B.to(device), self.count_B.to(device), self.queries, self.keys)

    @property
    def real_BQ(self) -> Tensor:
        """Which queries are not padding."""
        return torch.arange(self.queries, device=self.count_B.device) < self.count_B.unsqueeze(1)

    @property
    def is_long(self) -> bool:
        """Whether masks would take too much memory to be kept."""
        return self.keys > KEY_BLOCK

    def part(self, start: int, stop: int) -> PaddedRows:
        """Some of the queries of each row."""
        count_B = (self.count_B - start).clamp(0, stop - start)
        return PaddedRows(self.first_B + start, count_B, stop - start, self.keys)

    def parts(self, heads: int) -> Iterator[tuple[slice, PaddedRows]]:
        """As many queries at a time as SCORES_AT_ONCE allows."""
        step = max(ROWS, SCORES_AT_ONCE // (len(self.first_B) * heads * self.keys) // ROWS * ROWS)
        if step >= self.queries:
            yield slice(None), self
            return
        for start in range(0, self.queries, step):
            stop = min(start + step, self.queries)
            yield slice(start, stop), self.part(start, stop)

    def within(self, window: int | None) -> tuple[int, PaddedRows]:
        """How many of the first keys no query's window reaches, and the rows without these.

        Whole blocks of the kernel's: those it would find nothing in, so that the bits stay the same.
        """
        if window is None or window >= self.keys:
            return 0, self
        if window not in self._within:
            start = max(0, int(self.first_B.min()) - window + 1) // KEY_BLOCK * KEY_BLOCK
            rows = self
            if start:
                rows = PaddedRows(self.first_B - start, self.count_B, self.queries, self.keys - start)
            self._within[window] = start, rows
        return self._within[window]

    def mask(self, dtype: torch.dtype, window: int | None, group: int = 1) -> Tensor:
        """To be added to scores [B, 1, group x queries, keys]."""
        if self.is_long:
            return self._make_mask(dtype, window, group)
        name = group, dtype, window
        if name not in self._masks:
            self._masks[name] = self._make_mask(dtype, window, group)
        return self._masks[name]

    def _make_mask(self, dtype: torch.dtype, window: int | None, group: int) -> Tensor:
        device = self.first_B.device
        # Padded queries see what the last real one does: a query that sees nothing would give NaN.
        i_BQ = torch.minimum(
            torch.arange(self.queries, device=device), (self.count_B - 1).clamp(0).unsqueeze(1)
        )
        place_BQ1 = (self.first_B.unsqueeze(1) + i_BQ).unsqueeze(2)
        place_J = torch.arange(self.keys, device=device)
        hidden_BQJ = place_J > place_BQ1
        if window is not None:
            hidden_BQJ |= place_J <= place_BQ1 - window
        mask_BQJ = torch.zeros(hidden_BQJ.shape, dtype=dtype, device=device)
        return mask_BQJ.masked_fill_(hidden_BQJ, float("-inf")).unsqueeze(1).repeat(1, 1, group, 1)

    def line_mask(self, dtype: torch.dtype, window: int | None) -> Tensor:
        """The mask of the queries in reverse order, all rows of which are in one line for each b."""
        length = self.queries + self.keys
        last_B1 = (self.first_B + self.queries - 1).unsqueeze(1)
        place = torch.arange(length, device=self.first_B.device)
        hidden = place > last_B1
        if window is not None:
            hidden |= place <= last_B1 - window
        line = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, float("-inf")
        )
        return line.as_strided((len(line), 1, self.queries, self.keys), (length, 0, 1, 1))


def attend(rows: PaddedRows, query: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """Output [B, Q, heads, D] of queries [B, Q, heads, D] to keys and values [B, kv heads, J, D].

    Autograd can go through it; for long rows without gradients, or in `backward`.
    """
    if _has_kernel(rows, query, v, rule):
        return attend_long(rows, query, k, v, rule)[0]
    if not rows.is_long and not rule.is_written_out:
        return _dense(rows, query, k, v, rule)
    parts = [_dense(part, query[:, where], k, v, rule) for where, part in rows.parts(query.shape[2])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def attend_long(
    rows: PaddedRows, query: Tensor, k: Tensor, v: Tensor, rule: AttentionRule
) -> tuple[Tensor, Tensor | None]:
    """As `attend`, without a mask of its own size; with what `backward` needs, [B, Q, heads] or None."""
    if not _has_kernel(rows, query, v, rule):
        return attend(rows, query, k, v, rule), None
    mask = rows.line_mask(query.dtype, rule.window)
    out, sums = _flash(query.flip(1).transpose(1, 2), k, v, attn_mask=mask, scale=rule.scale)
    return out.transpose(1, 2).flip(1), sums.transpose(1, 2).flip(1)


def backward(
    rows: PaddedRows,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sums: Tensor | None,
    rule: AttentionRule,
) -> list[Tensor]:
    """Gradients of query, k and v, and of sinks if there are any, from those of `attend_long`'s output."""
    query, k, v = inputs
    if sums is not None:
        backwards = (x.flip(1).transpose(1, 2) for x in (grad, query))
        mask = rows.line_mask(query.dtype, rule.window)
        outs = (x.flip(1).transpose(1, 2) for x in (out, sums))
        grad_q, grad_k, grad_v = _flash_backward(
            next(backwards), next(backwards), k, v, *outs, 0.0, False, attn_mask=mask, scale=rule.scale
        )
        return [grad_q.transpose(1, 2).flip(1), grad_k, grad_v]
    grad_q, shared = torch.empty_like(query), [k, v] if rule.sinks is None else [k, v, rule.sinks]
    totals = [torch.zeros_like(x) for x in shared]
    for where, part in rows.parts(query.shape[2]):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (query[:, where], *shared)]
            again = rule if rule.sinks is None else replace(rule, sinks=leaves[3])
            part_out = _dense(part, leaves[0], leaves[1], leaves[2], again)
        found = torch.autograd.grad(part_out, leaves, grad[:, where])
        grad_q[:, where] = found[0]
        for total, more in zip(totals, found[1:], strict=True):
            total += more
    return [grad_q, *totals]


def _has_kernel(rows: PaddedRows, query: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Whether the CPU's kernel can take these long rows."""
    alike = query.shape[-1] == v.shape[-1]
    return rows.is_long and query.device.type == "cpu" and alike and not rule.is_written_out


def _dense(rows: PaddedRows, query: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """With a mask. Heads that share keys become further queries, so keys and values are never repeated."""
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
    """Attention of queries [B, kv heads, group, Q, D] to [B, kv heads, J, D], with soft cap and sinks."""
    kv_heads, group = q.shape[1:3]
    scores = q.flatten(2, 3) @ k.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.unflatten(2, (group, -1)) + mask
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return (weights[..., : k.shape[2]].flatten(2, 3) @ v).unflatten(2, (group, -1))
