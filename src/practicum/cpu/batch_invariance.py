"""Shapes in which a token's numbers do not depend on what else is in the batch.

Algebra libraries choose by the shapes of a product how they add up. In these shapes the choice does not show
in a row's result, to the bit: products have a multiple of ROWS rows (`padded_tokens` for a whole model),
attention has a multiple of ROWS queries and `padded_keys` keys. So a token has the same keys, values and
logprobs whether it is decoded, prefilled, continued from cached keys and values, scored or trained on, and
whatever its neighbours are. Found by comparing bits. The torch engine's probe proves it where it runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, scaled_dot_product_attention, silu

from practicum.cpu import switch


def _fewest_rows() -> int:
    """Return the number of rows from which a row's product has the same bits on this CPU."""
    x_N, weight = torch.randn(2, 32, 1024, generator=torch.Generator().manual_seed(0))
    return next((n for n in (4, 16) if torch.equal(linear(x_N[:n], weight), linear(x_N, weight)[:n])), 4)


ROWS = _fewest_rows()
"""Products with fewer rows, or with some left over, take other ways through the algebra libraries."""
SIZES = 8
"""Numbers of rows from one power of two to the next."""
_WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
LANES, NUMBERS_OF_A_THREAD = 64 if _WIDE else 32, 32_768
"""Activations on a CPU take this many numbers at once (in bfloat16, half of them in float32), and another
thread above the second number."""
KEY_STEP = 16 if _WIDE else 8
KEY_BLOCK = 512
"""Sums over keys go in lanes of KEY_STEP; attention on a CPU takes KEY_BLOCK keys at a time."""
_FEWEST = 16
"""Fewer keys of a block are added up in a different order."""
WHOLE = 192
"""On every CPU tried, up to this many keys of a block are one sum."""
_PARTS = ((WHOLE, 384), (256, KEY_BLOCK))
"""Pairs for the CPUs tried: more keys than the first number and fewer than the second are split into other
sums than those of a whole block."""


def padded_rows(count: int) -> int:
    """Return the next multiple of ROWS."""
    return -(-count // ROWS) * ROWS if switch.ENABLED else count


def rounded_rows(count: int) -> int:
    """Return the next of few numbers of rows: multiples of ROWS, and SIZES of them up to twice as many.

    oneDNN compiles code for each number of rows that it meets, which costs a millisecond and 0.3 MB. Code
    that comes and goes also cuts freed memory into pieces, by which the process grows.
    """
    step = max(ROWS, 2 ** (max(count, 1).bit_length() - 1) // SIZES)
    return -(-count // step) * step if switch.ENABLED else count


def padded_tokens(count: int, width: int) -> int:
    """Return the number of rows that tokens are padded to before activations of this width, one of few."""
    rows = rounded_rows(count)
    while not is_even(rows, width):
        rows += ROWS
    return rows


def is_even(rows: int, width: int) -> bool:
    """Return True if an activation of this width computes all rows in one way.

    Each thread takes an equal part of the numbers, LANES at a time; what is left over goes through another
    function, which may round otherwise. So nothing may be left over.
    """
    threads = max(1, min(torch.get_num_threads(), -(-rows * width // NUMBERS_OF_A_THREAD)))
    return not switch.ENABLED or (rows % ROWS == 0 and rows * width % (LANES * threads) == 0)


def mlp_width(model: nn.Module) -> int:
    """Return the width of a model's MLP layers, by default LANES."""
    config: Any = getattr(model, "config", None)
    width = config and getattr(config.get_text_config(), "intermediate_size", None)
    return width if width and isinstance(width, int) else LANES


def padded_keys(count: int) -> int:
    """Return the next number of keys at which sums over the keys before are added up in the same order."""
    if not switch.ENABLED:
        return count
    return _padded_keys(count, *_parts())


def _padded_keys(count: int, whole: int, parts: int) -> int:
    count = -(-count // KEY_STEP) * KEY_STEP
    rest = count % KEY_BLOCK
    if 0 < rest < _FEWEST:
        return count + _FEWEST - rest
    return count + parts - rest if whole < rest < parts else count


@cache
def _parts() -> tuple[int, int]:
    """Return the entry of _PARTS with which this CPU's attention is invariant, or the first."""
    like = 64, torch.float32, torch.device("cpu")
    return next((parts for parts in _PARTS if _attention_is_invariant(*like, *parts)), _PARTS[0])


def pad_rows(x_N: Tensor, rows: int | None = None) -> Tensor:
    """Add rows of 0, up to this many or by default to the next number that products have."""
    more = (padded_tokens(len(x_N), LANES) if rows is None else rows) - len(x_N)
    return pad(x_N, (0, 0) * (x_N.dim() - 1) + (0, more)) if more else x_N


@cache
@torch.no_grad()
def activations_are_invariant(width: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return True if activations of this width are equal among few and many tokens."""
    most = (threads + 1) * NUMBERS_OF_A_THREAD // width + ROWS
    x_N = 3 * torch.randn(padded_tokens(most, width), width, generator=torch.Generator().manual_seed(0))
    x_N = x_N.to(device, dtype)
    for function in (silu, gelu):
        few = torch.cat([function(x) for x in x_N.split(padded_tokens(1, width))])
        for count in range(max(1, most - 5 * ROWS), most, ROWS):
            rows = padded_tokens(count, width)
            if not torch.equal(function(x_N[:rows])[:count], few[:count]):
                return False
    return True


@cache
@torch.no_grad()
def attention_is_invariant(width: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return True if attention near the edges of `padded_keys` is equal among few and many tokens."""
    return _attention_is_invariant(width, dtype, device, *_parts())


@torch.no_grad()
def _attention_is_invariant(
    width: int, dtype: torch.dtype, device: torch.device, whole: int, parts: int
) -> bool:
    many = 3 * KEY_BLOCK
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, many, width, generator=generator).to(device, dtype) for _ in range(3))
    late_JJ = torch.ones(many, many, dtype=torch.bool, device=device).triu(1)
    mask_JJ = torch.zeros(many, many, dtype=dtype, device=device).masked_fill_(late_JJ, float("-inf"))
    all_keys = scaled_dot_product_attention(q, k, v, mask_JJ)
    edges = [_FEWEST, _FEWEST + KEY_STEP, whole, parts, KEY_BLOCK, KEY_BLOCK + whole]
    for last in (edge + offset for edge in [*edges, many - KEY_BLOCK + KEY_STEP] for offset in (0, 2)):
        few, keys = slice(last - ROWS, last), _padded_keys(last, whole, parts)
        part = scaled_dot_product_attention(q[:, :, few], k[:, :, :keys], v[:, :, :keys], mask_JJ[few, :keys])
        if not torch.equal(part, all_keys[:, :, few]):
            return False
    return True
