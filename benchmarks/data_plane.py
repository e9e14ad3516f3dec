"""Moving columns from one actor to another: practicum's stores and what else there is.

Put and get are timed inside the actors. Columns that go through the controller have no put and get, so all
are timed by the controller's clock too: from the first call to the end of the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from benchmarks import harness
from benchmarks.clusters import Turn, cluster, in_turn, wants_quick
from benchmarks.harness import Measured
from benchmarks.routes import Mover, start_plain
from benchmarks.rows import Shape, draw_lengths, make_batch
from benchmarks.ways import ADAPTER, BARE, CALLS, LEARNER, MEMCPY, OURS, PLAIN, THROUGH
from practicum.dataplane.ray_store.ray_store import start_ray_store
from practicum.dataplane.transferqueue.transferqueue_store import start_transferqueue

ROUNDS = 9
SHAPES = {
    **{f"{rows} rows": Shape(rows) for rows in (32, 128, 512)},
    "32 rows of 8 MB": Shape(32, (512, 1536), ("teacher_hidden",), {"H": 2048}),
}
JUDGED = "512 rows"
QUICK = {"8 rows": Shape(8), "2 rows of 8 MB": Shape(2, (1024, 1024), ("teacher_hidden",), {"H": 2048})}


def contenders(writer: Any, reader: Any, shape: Shape) -> dict[str, Turn]:
    """Everybody who moves what the two actors have prepared; keys and tags go along with the calls."""
    lengths = draw_lengths(shape.rows, shape.tokens)

    def moved(route: str) -> Turn:
        def turn(number: int) -> Measured:
            batch = make_batch(f"turn{number}", lengths)
            began = time.perf_counter()
            put, given = ray.get(writer.put.remote(route, batch))
            got: float = ray.get(reader.get.remote(route, batch, given, number < 0))
            whole = time.perf_counter() - began
            ray.get(writer.clear.remote(route, batch))
            return {"put": put, "get": got, "moved": put + got, "whole": whole}

        return turn

    def sent(form: str) -> Turn:
        def turn(number: int) -> Measured:
            began = time.perf_counter()
            held = ray.get(writer.give.remote(form))
            ray.get(reader.take.remote(form, held, number < 0))
            return {"whole": time.perf_counter() - began}

        return turn

    def copied(number: int) -> Measured:
        seconds: float = ray.get(writer.memcpy.remote())
        return {"moved": seconds, "whole": seconds}

    def called(number: int) -> Measured:
        began = time.perf_counter()
        ray.get(writer.nothing.remote())
        ray.get(reader.nothing.remote())
        return {"whole": time.perf_counter() - began}

    routes = {name: moved(name) for name in (OURS, LEARNER, ADAPTER, PLAIN, BARE)}
    routes |= {name: sent(form) for form, name in THROUGH.items()}
    return routes | {MEMCPY: copied, CALLS: called}


def measure(rounds: int, shapes: dict[str, Shape]) -> tuple[dict[str, Any], dict[str, int]]:
    """What each contender took in each round of each shape, and the bytes of the shapes."""
    raced, sizes = {}, {}
    stops: list[Callable[[], None]] = []
    with cluster(cpus=8):
        try:
            ours, adapter = start_ray_store(), start_transferqueue(units=1)
            stops += [ours.close, adapter.close]
            handles = {OURS: ours, LEARNER: ours, ADAPTER: adapter}
            stops.append(start_plain())
            actor: Any = ray.remote(num_cpus=1)(Mover)
            writer, reader = actor.remote(handles), actor.remote(handles)
            for title, shape in shapes.items():
                sizes[title], _ = ray.get([one.prepare.remote(shape) for one in (writer, reader)])
                print(f"{title}, {sizes[title] / 1e6:.1f} MB", flush=True)
                raced[title] = in_turn(contenders(writer, reader, shape), rounds)
        finally:
            for stop in reversed(stops):
                stop()
    return raced, sizes


def main() -> None:
    """Measure all shapes, and write the results."""
    if wants_quick():
        measure(2, QUICK)
        return
    raced, sizes = measure(ROUNDS, SHAPES)
    content = {"judged": JUDGED, "rounds": ROUNDS, "bytes": sizes, "raced": raced}
    harness.write_results("data_plane", content)


if __name__ == "__main__":
    main()
