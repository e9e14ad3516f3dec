"""Shapes in which a token's numbers do not depend on what else is in the batch.

Algebra libraries choose by the shapes of a product how they add up. In these shapes the choice does not show
in a row's result, to the bit: products have a multiple of ROWS rows (`padded_tokens` for a whole model),
attention has a multiple of ROWS queries and `padded_keys` keys. So a token has the same keys, values and
logprobs whether it is decoded, prefilled, continued from cached keys and values, scored or trained on, and
whatever its neighbours are. Found by comparing bits; the torch engine's probe proves it where it runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention, silu

from practicum.cpu import switch

ROWS = 4
"""Products with fewer rows, or with some left over, take other ways through the algebra libraries."""
_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
LANES, NUMBERS_OF_A_THREAD = 64 if _WIDE else 32, 32_768
"""Activations on a CPU take this many numbers at once (in bfloat16, half of them in float32), and another
thread above the second number."""
KEY_STEP = 16 if _WIDE else 8
KEY_BLOCK = 512
"""Sums over keys go in lanes of KEY_STEP; attention on a CPU takes KEY_BLOCK keys at a time."""
_FEWEST, WHOLE, _PARTS = 16, 192, 384
"""Fewer keys of a block than the first, and those between the others, are added up in a different order: sums
of more than WHOLE are made of parts, up to _PARTS of two halves."""


def padded_rows(count: int) -> int:
    """Return the next multiple of ROWS."""
    return -(-count // ROWS) * ROWS if switch.ENABLED else count


def padded_tokens(count: int, width: int) -> int:
    """Return the next number of tokens that an activation of this width computes in one way.

    Each thread takes an equal part of the numbers, LANES at a time; what is left over goes through another
    function, which may round otherwise. So nothing is left over.
    """
    rows, threads = padded_rows(count), torch.get_num_threads()
    while switch.ENABLED and rows * width % (LANES * min(threads, -(-rows * width // NUMBERS_OF_A_THREAD))):
        rows += ROWS
    return rows


def mlp_width(model: nn.Module) -> int:
    """Return the width of a model's layers between attention; LANES if its config does not say."""
    config: Any = getattr(model, "config", None)
    width = config and getattr(config.get_text_config(), "intermediate_size", None)
    return width if width and isinstance(width, int) else LANES


def padded_keys(count: int) -> int:
    """Return the next number of keys at which sums over the keys before are added up in the same order."""
    if not switch.ENABLED:
        return count
    count = -(-count // KEY_STEP) * KEY_STEP
    rest = count % KEY_BLOCK
    if 0 < rest < _FEWEST:
        return count + _FEWEST - rest
    return count + _PARTS - rest if WHOLE < rest < _PARTS else count


def pad_rows(x_N: Tensor, rows: int | None = None) -> Tensor:
    """Add rows of 0 after the last one, up to this many or a multiple of ROWS."""
    more = (padded_rows(len(x_N)) if rows is None else rows) - len(x_N)
    return pad(x_N, (0, 0) * (x_N.dim() - 1) + (0, more)) if more else x_N


@cache
@torch.no_grad()
def activations_are_invariant(width: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return True if activations of this width keep the promise, with more numbers than one thread takes.

    Each token is computed among few and among many, whose numbers do not go evenly into lanes and threads.
    """
    most = (threads + 1) * NUMBERS_OF_A_THREAD // width + ROWS
    x_N = 3 * torch.randn(padded_tokens(most, width), width, generator=torch.Generator().manual_seed(0))
    x_N = x_N.to(device, dtype)
    for function in (silu, gelu):
        few = torch.cat([function(x) for x in x_N.split(padded_tokens(1, width))])
        for count in range(most - 5 * ROWS, most, ROWS):
            rows = padded_tokens(count, width)
            if not torch.equal(function(x_N[:rows])[:count], few[:count]):
                return False
    return True


@cache
@torch.no_grad()
def attention_is_invariant(width: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return True if attention over heads of this width keeps the promise with this dtype and threads.

    Tokens near the edges of `padded_keys` are computed among few queries and keys, and among many.
    """
    many = 3 * KEY_BLOCK
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, many, width, generator=generator).to(device, dtype) for _ in range(3))
    late_JJ = torch.ones(many, many, dtype=torch.bool, device=device).triu(1)
    mask_JJ = torch.zeros(many, many, dtype=dtype, device=device).masked_fill_(late_JJ, float("-inf"))
    whole = scaled_dot_product_attention(q, k, v, mask_JJ)
    edges = [_FEWEST, _FEWEST + KEY_STEP, WHOLE, _PARTS, KEY_BLOCK, KEY_BLOCK + WHOLE]
    for last in (edge + offset for edge in [*edges, many - KEY_BLOCK + KEY_STEP] for offset in (0, 2)):
        few, keys = slice(last - ROWS, last), padded_keys(last)
        part = scaled_dot_product_attention(q[:, :, few], k[:, :, :keys], v[:, :, :keys], mask_JJ[few, :keys])
        if not torch.equal(part, whole[:, :, few]):
            return False
    return True
