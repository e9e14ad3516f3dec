"""Attention of long rows by the CPU's flash kernel, without a mask of the square of their length.

What a token sees depends on its distance to a key alone, so all rows of a mask are parts of one line. The
kernel reads that line, one place further for each query, so queries go in reverse order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.compat.torch import cpu_flash, cpu_flash_backward
from practicum.cpu import switch


def can_attend(query: Tensor, v: Tensor) -> bool:
    """Return True if the kernel takes these queries and values."""
    known = switch.ENABLED and cpu_flash is not None and cpu_flash_backward is not None
    return known and query.device.type == "cpu" and query.shape[-1] == v.shape[-1]


def _line_mask(first_B: Tensor, query: Tensor, keys: int, window: int | None) -> Tensor:
    """Return the mask of the queries in reverse order, all rows of which are in one line for each b."""
    queries = query.shape[1]
    last_B1 = (first_B + queries - 1).unsqueeze(1)
    place = torch.arange(queries + keys, device=query.device)
    hidden = place > last_B1
    if window is not None:
        hidden |= place <= last_B1 - window
    line = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    return line.as_strided((len(line), 1, queries, keys), (queries + keys, 0, 1, 1))


def attend(
    first_B: Tensor, query: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Q, heads, D] of queries that stand at `first_B` on, and sums for `backward`."""
    mask = _line_mask(first_B, query, k.shape[2], window)
    out, sums = cpu_flash(query.flip(1).transpose(1, 2), k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flip(1), sums.transpose(1, 2).flip(1)


def backward(
    first_B: Tensor,
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    scale: float,
    window: int | None,
) -> list[Tensor]:
    """Return gradients of query, k and v from that of the output. `outputs` are those of `attend`."""
    query, k, v = inputs
    mask = _line_mask(first_B, query, k.shape[2], window)
    grad, query, out, sums = (x.flip(1).transpose(1, 2) for x in (grad, query, *outputs))
    grad_q, grad_k, grad_v = cpu_flash_backward(
        grad, query, k, v, out, sums, 0.0, False, attn_mask=mask, scale=scale
    )
    return [grad_q.transpose(1, 2).flip(1), grad_k, grad_v]
