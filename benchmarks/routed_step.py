"""A whole step with columns through the controller or through the store, for text and for images."""

from __future__ import annotations

from typing import Any

from benchmarks import harness
from benchmarks.clusters import Turn, cluster, in_turn, wants_quick
from benchmarks.harness import Measured
from benchmarks.pipeline import PATCH, STAGES, Load, Pipeline
from benchmarks.ways import OURS, THROUGH
from practicum.dataplane.ray_store.ray_store import start_ray_store

ROUNDS = 7
IMAGE_PATCHES = 8 * 2**20 // (4 * PATCH)
LOADS = {
    "text, 512 rows": Load(512, (256, 2048)),
    "images of 8 MB, 32 rows": Load(32, (256, 2048), IMAGE_PATCHES),
}
PUBLISHED = (0.07, 0.492)
"""Gains that were published of the change from one way to the other, end to end, on many GPUs."""


def measure(rounds: int, loads: dict[str, Load]) -> dict[str, dict[str, list[Measured]]]:
    """Seconds of the step of each load by each route, in each round."""
    raced = {}
    with cluster(cpus=8, object_store_gb=4.0):
        handle = start_ray_store()
        pipeline = Pipeline(handle)
        turns: dict[str, Turn] = {OURS: lambda _: pipeline.step(None)}
        turns |= {name: lambda _, form=form: pipeline.step(form) for form, name in THROUGH.items()}
        for title, load in loads.items():
            print(title, flush=True)
            pipeline.prepare(load)
            raced[title] = in_turn(turns, rounds)
        handle.close()
    return raced


def main() -> None:
    """Measure all loads, and write the results."""
    if wants_quick():
        measure(2, {"text": Load(16, (32, 64)), "images": Load(4, (32, 64), 100)})
        return
    raced = measure(ROUNDS, LOADS)
    settings: dict[str, Any] = {"rounds": ROUNDS, "stages": list(STAGES)}
    content = {"published": PUBLISHED, "settings": settings, "raced": raced}
    harness.write_results("routed_step", content)


if __name__ == "__main__":
    main()
