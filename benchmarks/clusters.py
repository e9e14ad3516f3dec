"""A Ray cluster on this machine for benchmarks, and contenders that share it and take turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from benchmarks.harness import HERE, Measured
from practicum.recipe.schema.runtime_section import Runtime
from practicum.runtime.ray.init_ray import connect

Turn = Callable[[int], Measured]
"""Runs a turn of this number, and tells what it measured."""


@contextmanager
def cluster(cpus: int = 8) -> Iterator[None]:
    """Ray on loopback with so many logical CPUs, one thread in each process; stopped at the end."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    leave = connect(Runtime(kind="ray", cpus=cpus), env)
    try:
        yield
    finally:
        leave()


def in_turn(contenders: Mapping[str, Turn], rounds: int, warmup: int = 2) -> dict[str, list[Measured]]:
    """Run all contenders `rounds` times after the warm-up, beginning with another one each time.

    Turns of the warm-up have numbers below 0.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(-warmup, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found = contenders[name](turn)
            if turn >= 0:
                measured[name].append(found)
    for name, found in measured.items():
        mids = {key: statistics.median(one[key] for one in found) for key in found[0]}
        print(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in mids.items()), flush=True)
    return measured


def wants_quick() -> bool:
    """Whether the command has --quick: a small setting, to see that all works; no results are written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small setting; writes no results")
    return parser.parse_args().quick
