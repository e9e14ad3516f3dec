"""One uniform number per (seed, prompt, session, turn, position), without state."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.engines.protocol import Counter
from practicum.engines.torch.sampler import stream_key, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """Steele, Lea, Flood 2014, as published."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def grid(count: int, axis: str) -> torch.Tensor:
    """Numbers of `count` neighbours along one axis of the counter (or the position), 64 starts each."""
    rows = []
    for start in range(64):
        base = {"seed": 1, "prompt": start, "session": 0, "turn": 0}
        if axis == "position":
            keys = torch.full((count,), stream_key(Counter(**base)))
            rows.append(uniforms(keys, torch.arange(count)))
        else:
            keys = [stream_key(Counter(**(base | {axis: 1000 * start + i}))) for i in range(count)]
            rows.append(uniforms(torch.tensor(keys), torch.zeros(count, dtype=torch.int64)))
    return torch.stack(rows)


AXES = ("seed", "prompt", "session", "turn", "position")


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_numbers_are_splitmix64(key: int, position: int):
    expected = splitmix64((key + position * 0x9E3779B97F4A7C15) & MASK)
    number = uniforms(torch.tensor([key]), torch.tensor([position]))
    assert number.dtype == torch.float64
    assert float(number) == (expected >> 12) / 2**52


def test_the_largest_number_times_a_total_stays_below_the_total():
    largest = 1 - 2.0**-52
    totals = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    totals = torch.cat([totals, 2.0 ** torch.arange(-20, 20, dtype=torch.float64)])
    assert bool((totals * largest < totals).all())


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_axis(axis: str):
    counts = torch.histc(grid(1024, axis), bins=64, min=0.0, max=1.0)
    expected = 64 * 1024 / 64
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 120  # 63 degrees of freedom: p < 2e-5


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis: str):
    numbers = grid(1025, axis)
    cells = (numbers[:, :-1] * 16).long() * 16 + (numbers[:, 1:] * 16).long()
    counts = torch.bincount(cells.flatten(), minlength=256).double()
    expected = cells.numel() / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 350  # 255 degrees of freedom: p < 8e-5


def test_every_part_of_the_counter_counts():
    parts = itertools.product((0, 1, 2), repeat=4)
    keys = {stream_key(Counter(*part)) for part in parts}
    assert len(keys) == 3**4


def test_counters_beyond_64_bits_are_taken():
    assert -(2**63) <= stream_key(Counter(2**80, -5, 2**64 - 1)) < 2**63
