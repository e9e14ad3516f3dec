"""What a step of the demo costs more on Ray than in one process, stage by stage, and how long each starts.

The recipes are those of recipes/mopd: a specialist by GRPO and the student with three teachers, with the base
model in place of the specialists, because only its size matters here. The learning rate is too small to
change the model, so all steps are alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from benchmarks.clusters import wants_quick
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.stepping import Steps, demo_recipe, mean
from practicum.commands.demo import STUDENT
from practicum.recipe.schema.recipe import Recipe

SPECIALIST = "reverse"
RECIPES = {"GRPO specialist": SPECIALIST, "student with three teachers": STUDENT}
THREADS = (1, 2)
ROUNDS, STEPS = 7, 5
"""Turns, and steps of one."""
LR = 1e-9
LOCAL, RAY = "local", "ray"


def recipe_of(name: str, kind: str, threads: int) -> Recipe:
    """A recipe of the demo in this runtime; a cluster gets CPUs to spare."""
    changes = [f"name={name}-{kind}-{threads}", f"train.lr={LR}", f"runtime.threads={threads}"]
    return demo_recipe(name, *changes, *(["runtime.kind=ray", "runtime.cpus=8"] if kind == RAY else []))


def stepper(channel: Channel, recipe: str, kind: str, threads: int, steps: int) -> None:
    """Turns of some steps each; all tell how long the start took."""
    began = time.perf_counter()
    with Steps(recipe_of(recipe, kind, threads)) as run:
        started = time.perf_counter() - began
        channel.serve(lambda turn: {**mean([run.step() for _ in range(steps)]), "start": started})


def measure(rounds: int, steps: int, threads: Sequence[int]) -> dict[str, dict[str, list[Measured]]]:
    """Both runtimes in turn, for each recipe and number of threads."""
    for name in RECIPES.values():
        recipe_of(name, LOCAL, 1)  # makes the models
    raced: dict[str, Any] = {}
    for each in threads:
        for title, name in RECIPES.items():
            setting = f"{each} thread{'s' if each > 1 else ''}, {title}"
            print(setting, flush=True)
            options = {"recipe": name, "threads": each, "steps": steps}
            contenders = [
                Contender(kind, "benchmarks.ray_step:stepper", {**options, "kind": kind}, each)
                for kind in (LOCAL, RAY)
            ]
            raced[setting] = harness.race(contenders, rounds, warmup=2)
            harness.require_same_work(raced[setting])
    return raced


def main() -> None:
    """Step all, and write the results."""
    if wants_quick():
        measure(1, 1, THREADS[:1])
        return
    raced = measure(ROUNDS, STEPS, THREADS)
    harness.write_results("ray_step", {"settings": {"steps": STEPS}, "raced": raced})


if __name__ == "__main__":
    main()
