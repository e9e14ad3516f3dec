"""A practicum run whose steps are taken one at a time: the real step of a real recipe."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.harness import Measured, Stopwatch
from benchmarks.model import CACHE, demo_folder, model_folder
from practicum.commands.demo import STUDENT
from practicum.observe.progress import ProgressView
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.trainer.run import Trainer
from practicum.trainer.run_folder import RunFolder

TIMED = (
    *("rollout", "reward", "teachers", "pad", "old_logprobs", "advantages", "update_student"),
    *("sync", "clear"),
)
DEMO_TEACHERS = ("copy", "reverse", "rotate")
METRICS = {
    "mean_reward": "reward/mean",
    "idle_share": "train/idle_tokens",
    "distill_loss": "train/distill_loss",
    "hidden": "teachers/overlap_fraction",
    "padding_rows": "padding/rows",
    "gradient": "train/grad_norm",
    "shared_learn": "shared/learn",
}
"""Further numbers of a step, where its recipe gives them."""


class Steps:
    """Takes steps of a recipe, all checks on; closes what it started at the end of the `with`."""

    def __init__(self, recipe: Recipe, *, stops: bool = True) -> None:
        folder = RunFolder(CACHE / "runs" / f"{recipe.name}-{os.getpid()}")
        console = Console(file=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the run
        self.run = Trainer(recipe, folder, ProgressView(recipe.name, recipe.train.steps, console=console))
        self.run.begin()
        if not stops:
            self.run.roles.stop = frozenset()
        self._number = 0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()
        shutil.rmtree(self.run.folder.path, ignore_errors=True)

    def step(self) -> Measured:
        """One step: its seconds, its seconds by stage, the tokens sampled, and what METRICS has."""
        self._number += 1
        watch = Stopwatch()
        metrics = self.run.runner.step(self._number)
        spent = watch.read()
        if self._number == 1:  # as a run does
            gc.collect(1)
            gc.freeze()
        stages = {name: metrics[f"time/{name}"] for name in TIMED if f"time/{name}" in metrics}
        more = {name: metrics[key] for name, key in METRICS.items() if key in metrics}
        scoring = [metrics.get(f"teacher/{name}/seconds", 0.0) for name in self.run.recipe.teachers]
        return {
            **spent,
            "tokens": metrics["rollout/tokens"],
            "shared_decode": metrics.get("shared/decode", 0.0),
            **more,
            **({"scoring": sum(scoring)} if scoring else {}),
            **stages,
        }


def mean(steps: Sequence[Measured]) -> Measured:
    """Mean of each number over the steps."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


GRPO: dict[str, Any] = {
    "reward": {"functions": [{"use": "checker"}]},
    "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean"},
}


def make_recipe(
    name: str,
    *,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    digits: tuple[int, int],
    lr: float,
    threads: int,
    hybrid: bool = False,
    **sections: Any,
) -> Recipe:
    """Sorting with the benchmark's model and these sections; everything else as the defaults have it."""
    written = {
        "name": name,
        "model": {"path": str(model_folder(hybrid=hybrid))},
        "tasks": {"sort": {"kind": "sort", "options": {"length": list(digits)}}},
        "rollout": {"samples": samples, "max_new_tokens": max_new_tokens},
        "train": {"prompts": prompts, "lr": lr, "steps": 1000},
        "eval": {"rows": 1},
        "runtime": {"threads": threads},
    }
    return Recipe.model_validate(written | sections)


def demo_recipe(name: str, *changes: str) -> Recipe:
    """A recipe of the demo from its base model, which here is also each of the teachers."""
    fixed = [f"model.path={demo_folder()}", "train.steps=10000", "eval.rows=1", "eval.every=10000"]
    if name == STUDENT:
        fixed += [f"teachers.{teacher}.model={demo_folder(teacher)}" for teacher in DEMO_TEACHERS]
    return load_recipe(shipped_recipes() / "mopd" / f"{name}.yaml", [*fixed, *changes]).recipe
