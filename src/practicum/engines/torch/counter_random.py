"""Randomness without state: each token's uniform number is a hash of what the token is.

A generation's key is a hash of its `Counter`; the number at a position is splitmix64's output for (key,
position). So a sample depends on nothing but its own identity: not on the batch, the slot, or the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.engines.protocol import Counter

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 31)


def stream_key(counter: Counter) -> int:
    """The counter's hash, as a signed 64-bit number."""
    key = 0
    for part in (counter.seed, counter.prompt, counter.session, counter.turn):
        key = _mix((key + part + _GAMMA) & _MASK)
    return _signed(key)


def uniforms(key_B: Tensor, position_B: Tensor) -> Tensor:
    """float64 [B] in [0, 1), one for each (key, position); both are int64.

    52 bits: the largest value is so far below 1 that its product with a total never rounds up to it.
    """
    x = key_B + (position_B + 1) * _signed(_GAMMA)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ _shift_right(x, shift)) * _signed(multiplier)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 12).to(torch.float64) * 2.0**-52


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
