"""Memory of the optimizer's state, and the time of a step: optimizers take turns, on equal parameters and
gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from practicum.learning.optimizer import OptimizerStepper
from practicum.recipe.schema.recipe import Train

ROUNDS = 5
MATRICES, WIDTH = 8, 1024
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "adamw, offload: disk": {"offload": "disk"},
}


def stepping(options: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """An optimizer of matrices; each call is a step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(MATRICES)]
    stepper = OptimizerStepper(parameters, Train(**options))

    def step() -> dict[str, float]:
        for p in parameters:
            p.grad = torch.ones_like(p)
        began = time.perf_counter()
        stepper.step(1e-4, {"loss": 1.0, "tokens": 1.0})
        seconds = time.perf_counter() - began
        state = stepper.optimizer.state.values()
        return {"seconds": seconds, "bytes": float(sum(x.nbytes for one in state for x in one.values()))}

    return step


def main() -> None:
    """Measure, print, write the numbers."""
    torch.set_num_threads(1)
    steps = {name: stepping(options) for name, options in OPTIMIZERS.items()}
    stepped: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, step in steps.items():
            measured = step()
            if turn:
                stepped[name].append(measured)
    for name, rounds in stepped.items():
        middle = harness.medians(rounds)
        print(f"  {name}: {middle['bytes'] / 1e6:.1f} MB, a step {1e3 * middle['seconds']:.0f} ms")
    harness.write_results("learner_memory", {"weights": 4.0 * MATRICES * WIDTH**2, "stepped": stepped})


if __name__ == "__main__":
    main()
