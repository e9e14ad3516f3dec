"""What a step of the demo costs more on Ray than in one process, stage by stage, and how long each starts.

The recipes are those of recipes/mopd: a specialist by GRPO and the student with three teachers, with the base
model in place of the specialists, because only its size matters here. The learning rate is too small to
change the model, so all steps are alike.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.clusters import wants_quick
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import CACHE
from benchmarks.stepping import Steps, mean
from practicum.commands.demo import BASE, STUDENT, demo_recipes
from practicum.recipe.schema.recipe import Recipe
from practicum.trainer.run import train_loaded

SPECIALIST = "reverse"
RECIPES = {"GRPO specialist": SPECIALIST, "student with three teachers": STUDENT}
THREADS = (1, 2)
ROUNDS, STEPS = 7, 5
"""Turns, and steps of one."""
LR = 1e-9
LOCAL, RAY = "local", "ray"


def demo_folder() -> Path:
    """The demo's base model, trained on first use, and copies of it as the specialists."""
    out = CACHE / "mopd"
    recipes = demo_recipes(out)
    if not (out / BASE / "export" / "model.safetensors").exists():
        train_loaded(recipes[BASE], out / BASE, fresh=True)
    for name in recipes:
        if name not in (BASE, STUDENT) and not (out / name).exists():
            shutil.copytree(out / BASE / "export", out / name / "export")
    return out


def recipe_of(name: str, kind: str, threads: int) -> Recipe:
    """A recipe of the demo in this runtime; a cluster gets CPUs to spare."""
    written = demo_recipes(demo_folder())[name].recipe.model_dump(mode="json")
    written["name"] = f"{name}-{kind}-{threads}"
    written["train"] |= {"lr": LR, "steps": 10_000}
    written["runtime"] |= {"kind": kind, "threads": threads}
    if kind == RAY:
        written["runtime"] |= {"cpus": 8}
    return Recipe.model_validate(written)


def stepper(channel: Channel, recipe: str, kind: str, threads: int, steps: int) -> None:
    """Turns of some steps each; all tell how long the start took."""
    began = time.perf_counter()
    with Steps(recipe_of(recipe, kind, threads)) as run:
        started = time.perf_counter() - began
        channel.serve(lambda turn: {**mean([run.step() for _ in range(steps)]), "start": started})


def measure(rounds: int, steps: int, threads: Sequence[int]) -> dict[str, dict[str, list[Measured]]]:
    """Both runtimes in turn, for each recipe and number of threads."""
    demo_folder()
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
            check_same(raced[setting])
    return raced


def check_same(raced: dict[str, list[Measured]]) -> None:
    """A ValueError if the two did not do the same work."""
    for mine, theirs in zip(raced[RAY], raced[LOCAL], strict=True):
        if mine["tokens"] != theirs["tokens"]:
            raise ValueError(f"not the same steps: {mine['tokens']} and {theirs['tokens']} tokens sampled")


def main() -> None:
    """Step all, and write the results."""
    if wants_quick():
        measure(1, 1, THREADS[:1])
        return
    raced = measure(ROUNDS, STEPS, THREADS)
    harness.write_results("ray_step", {"settings": {"steps": STEPS}, "raced": raced})


if __name__ == "__main__":
    main()
