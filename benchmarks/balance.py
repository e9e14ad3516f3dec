"""How even the tokens of ranks are, by rows in order and as training assigns them; and the time that takes.

Batches are those of `padding_table` in several sizes: agents' sessions, most rows short and a few very long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import Measured
from benchmarks.padding_table import cut, make_rows
from practicum.learning.balance import assign_ranks, in_order, step_imbalance
from practicum.learning.minibatches import Minibatch


class Shape(NamedTuple):
    """Rows of a batch and of an optimizer step, ranks, and how long the tail of lengths is."""

    rows: int
    minibatch: int
    ranks: int
    tail: float = 1.0


SHAPES = [
    *(Shape(1030, 256, ranks) for ranks in (2, 8, 64)),
    *(Shape(8200, 2048, ranks) for ranks in (2, 8, 64)),
    *(Shape(8200, 2048, ranks, tail=1.5) for ranks in (8, 64)),
]
ROUNDS = 5


def least_imbalance(minibatches: Sequence[Minibatch], tokens: Sequence[int], ranks: int) -> float:
    """What no assignment gets below: a rank has a mean share at least, and the longest row."""
    slowest = mean = 0.0
    for minibatch in minibatches:
        sizes = [tokens[row] for row in minibatch.rows]
        mean += sum(sizes) / ranks
        slowest += max(sum(sizes) / ranks, *sizes)
    return slowest / mean


def measure(shape: Shape, rounds: int) -> Measured:
    """Imbalance before and after, the least there can be, and seconds to assign the whole batch."""
    rows = make_rows(shape.rows, shape.minibatch, shape.ranks, shape.tail)
    minibatches, tokens, ranks = cut(rows, shape.minibatch, shape.ranks), rows.tokens, shape.ranks
    before = [[[one.rows[i] for i in part] for part in in_order(len(one), ranks)] for one in minibatches]
    assigned, seconds = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        assigned = assign_ranks(minibatches, tokens, ranks)
        seconds.append(time.perf_counter() - began)
    return {
        "before": step_imbalance(tokens, before) or 0.0,
        "after": step_imbalance(tokens, assigned) or 0.0,
        "least": least_imbalance(minibatches, tokens, ranks),
        "steps": len(minibatches),
        "longest": max(tokens),
        "mean": sum(tokens) / len(tokens),
        "seconds": statistics.median(seconds),
    }


def main(rounds: int = ROUNDS) -> None:
    """Measure all shapes, and write the results."""
    print("imbalance of ranks before and after")
    found = []
    for shape in SHAPES:
        measured = measure(shape, rounds)
        told = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
        print(f"  {shape.rows} rows, {shape.ranks} ranks, tail {shape.tail:g}: {told}", flush=True)
        found.append(shape._asdict() | measured)
    harness.write_results("balance", {"settings": {"rounds": rounds}, "shapes": found})


if __name__ == "__main__":
    main()
