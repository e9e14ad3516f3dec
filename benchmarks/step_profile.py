"""Where practicum's step spends its time, by torch.profiler: one step of the GRPO benchmark.

The engine decodes in a thread of its own, so the profiler has to be on in all threads.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks import grpo_step, harness
from benchmarks.harness import Channel, Contender
from benchmarks.model import model_folder
from benchmarks.stepping import Steps
from practicum.cpu.linears import product

LINEAR = "mkldnn::_linear_pointwise"
GROUPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", LINEAR),
    "attention": ("scaled_dot_product",),
    "norms": ("rms_norm", "RmsNorm"),
    "optimizer": ("Optimizer", "_foreach", "_fused_adam"),
    "copies and indexing": (
        *("aten::copy_", "aten::index", "aten::_index", "aten::cat", "aten::gather"),
        *("aten::scatter", "aten::fill_", "aten::zero_", "aten::clone", "aten::embedding"),
    ),
    "element by element": (
        *("aten::mul", "aten::add", "aten::sub", "aten::div", "aten::neg", "aten::pow"),
        *("aten::exp", "aten::silu", "aten::sigmoid", "aten::cos", "aten::sin", "softmax"),
    ),
}
"""Kinds of work by the beginnings of operator names; the rest is `other operators`."""


KIND = "kind: "


def profiled(channel: Channel) -> None:
    """Two steps to warm up, then one under the profiler: seconds by kind of work."""
    # Without this, the profiler sees only the thread that started it.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with Steps(grpo_step.recipe_of("profile", 1)) as steps:
        steps.step()
        steps.step()

        def run(turn: int) -> dict[str, float]:
            with profile(
                activities=[ProfilerActivity.CPU], experimental_config=everywhere, record_shapes=True
            ) as seen:
                found = steps.step()
            print(seen.key_averages().table("self_cpu_time_total", row_limit=40), file=sys.stderr)
            found["best_gflop_per_second"] = best_rate()
            kinds = by_kind(seen.key_averages(group_by_input_shape=True))
            return found | {f"{KIND}{name}": value for name, value in kinds.items()}

        channel.serve(run)


def by_kind(averages: Any) -> dict[str, float]:
    """Seconds of the operators themselves, summed by kind; calls; the matrix products' GFLOP."""
    seconds: dict[str, float] = defaultdict(float)
    for event in averages:
        kind = kind_of(event.key)
        seconds[kind] += event.self_cpu_time_total / 1e6
        seconds["calls"] += event.count
        if kind == "matrix products":
            seconds["gflop"] += event.count * gflop(event.key, event.input_shapes)
    return dict(seconds)


def gflop(operator: str, shapes: Sequence[Sequence[int]]) -> float:
    """Of one matrix product with these inputs; the two that are multiplied are the last matrices, or the
    first and the last of a linear layer, whose weight is transposed."""
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if operator == LINEAR:
        return 2 * math.prod(matrices[0]) * matrices[-1][0] / 1e9
    return 2 * math.prod(matrices[-2]) * matrices[-1][-1] / 1e9


def best_rate() -> float:
    """GFLOP/s of a matrix product of this model's widths and many rows: what this thread can do."""
    rows, wide, narrow = 2048, 1024, 256
    left, right = torch.randn(rows, narrow), torch.randn(wide, narrow)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        product(left, right)
        times.append(time.perf_counter() - began)
    return 2 * rows * wide * narrow / min(times) / 1e9


def kind_of(operator: str) -> str:
    """The kind of work that an operator is."""
    for kind, names in GROUPS.items():
        if any(name in operator for name in names):
            return kind
    return "other operators"


def main() -> None:
    """Profile, and write the split."""
    model_folder()
    print("profile of a step, 1 thread")
    contender = Contender("profile", "benchmarks.step_profile:profiled")
    found = harness.race([contender], rounds=1, warmup=0)["profile"][0]
    kinds = {name.removeprefix(KIND): v for name, v in found.items() if name.startswith(KIND)}
    step = {name: v for name, v in found.items() if not name.startswith(KIND)}
    counts = {"calls": int(kinds.pop("calls")), "gflop": kinds.pop("gflop")}
    harness.write_results("profile", {"step": step, "kinds": kinds, **counts})


if __name__ == "__main__":
    main()
