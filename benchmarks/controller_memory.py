"""Peak memory of the controller's process while responses grow: ×1, ×4 and ×16, the same rows.

The step of `pipeline` with columns through the store or through the controller, and a real run on Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.clusters import cluster, wants_quick
from benchmarks.distill_memory import status_bytes
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.pipeline import Load, Pipeline
from benchmarks.stepping import Steps
from benchmarks.ways import OURS, THROUGH
from practicum.dataplane.ray_store.ray_store import start_ray_store
from practicum.recipe.schema.recipe import Recipe

TIMES = (1, 4, 16)
REPEATS = 3
"""Steps of each length, of which the one with the highest peak counts."""
ROWS, TOKENS = 512, 256
RUN_ROWS, RUN_TOKENS = 256, 32
RUN = "a run of practicum on Ray"
MODULE = "benchmarks.controller_memory"
GOAL = 5e6
"""Bytes by which the peak may be higher at the longest responses than at the shortest."""


def peak(work: Callable[[], Any]) -> Measured:
    """The most memory that this process had during the work."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to now
    work()
    return {"bytes": status_bytes("VmHWM")}


def times_of(turn: int) -> int:
    """How long responses are in a turn; the first is the warm-up."""
    return TIMES[max(0, turn - 1) // REPEATS]


def pipeline(channel: Channel, form: str | None, rows: int, tokens: int) -> None:
    """Steps of the pipeline by one route."""
    with cluster(cpus=8, object_store_gb=2.0):
        handle = start_ray_store()
        steps = Pipeline(handle)

        def turn(number: int) -> Measured:
            length = tokens * times_of(number)
            steps.prepare(Load(rows, (length, length)))
            return peak(lambda: steps.step(form))

        channel.serve(turn)
        handle.close()


def run(channel: Channel, rows: int, tokens: int) -> None:
    """Steps of a real run, whose answers do not stop by themselves."""
    recipe = make_recipe(rows, tokens * TIMES[-1])
    with Steps(recipe, stops=False) as steps:

        def turn(number: int) -> Measured:
            length = tokens * times_of(number)
            shorter = recipe.rollout.model_copy(update={"max_new_tokens": length})
            steps.run.runner.recipe = recipe.model_copy(update={"rollout": shorter})
            return peak(steps.step)

        channel.serve(turn)


def make_recipe(rows: int, tokens: int) -> Recipe:
    """GRPO of a small random model on Ray, with answers of this many tokens at most."""
    make = {"family": "qwen3", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return Recipe.model_validate(
        {
            "name": "controller-memory",
            "model": {"make": {**make, "context": tokens + 64}},
            "tasks": {"sort": {"kind": "sort", "options": {"length": [6, 18]}}},
            "reward": {"functions": [{"use": "benchmarks.growth:is_even", "batch": True}]},
            "algorithm": {"advantage": "grpo", "loss": "ppo_clip"},
            "rollout": {"samples": 8, "max_new_tokens": tokens, "slots": rows},
            "train": {"prompts": rows // 8, "lr": 1e-6, "steps": 1000},
            "eval": {"rows": 1},
            "runtime": {"kind": "ray", "threads": 1, "cpus": 8, "object_store_gb": 1.0},
        }
    )


def measure(rows: int, tokens: int, run_rows: int, run_tokens: int) -> dict[str, dict[str, Measured]]:
    """By contender and length, the highest peak of the steps; each contender runs alone."""
    forms: dict[str, str | None] = {OURS: None} | {name: form for form, name in THROUGH.items()}
    size = {"rows": rows, "tokens": tokens}
    contenders = [
        Contender(name, f"{MODULE}:pipeline", {**size, "form": form}) for name, form in forms.items()
    ]
    contenders.append(Contender(RUN, f"{MODULE}:run", {"rows": run_rows, "tokens": run_tokens}))
    found: dict[str, dict[str, Measured]] = {}
    for contender in contenders:
        steps = harness.race([contender], rounds=REPEATS * len(TIMES))[contender.name]
        by_length = {times: steps[i * REPEATS : (i + 1) * REPEATS] for i, times in enumerate(TIMES)}
        highest = {str(times): max(some, key=lambda s: s["bytes"]) for times, some in by_length.items()}
        found[contender.name] = highest
    return found


def main() -> None:
    """Measure all, and write the results."""
    print("peak memory of the controller with longer responses")
    if wants_quick():
        measure(16, 16, 16, 4)
        return
    found = measure(ROWS, TOKENS, RUN_ROWS, RUN_TOKENS)
    settings = {"rows": ROWS, "tokens": TOKENS, "run_rows": RUN_ROWS, "run_tokens": RUN_TOKENS}
    harness.write_results("controller_memory", {"goal": GOAL, "settings": settings, "peaks": found})


if __name__ == "__main__":
    main()
