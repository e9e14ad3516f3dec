"""A practicum run whose steps are taken one at a time: the real step of a real recipe."""

from __future__ import annotations

import os
import shutil
from typing import Any

from rich.console import Console

from benchmarks.harness import Measured, Stopwatch
from benchmarks.model import CACHE, model_folder
from practicum.observe.progress import ProgressView
from practicum.recipe.schema import Recipe
from practicum.trainer.folder import RunFolder
from practicum.trainer.run import Run

TIMED = ("rollout", "reward", "advantages", "update_student", "sync", "clear")


class Steps:
    """Takes steps of a recipe, all checks on; closes what it started at the end of the `with`."""

    def __init__(self, recipe: Recipe, *, stops: bool = True) -> None:
        folder = RunFolder(CACHE / "runs" / f"{recipe.name}-{os.getpid()}")
        console = Console(file=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the run
        self.run = Run(recipe, folder, ProgressView(recipe.name, recipe.train.steps, console=console))
        self.run.begin(resume=False)
        if not stops:
            self.run.roles.stop = frozenset()
        self._number = 0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()
        shutil.rmtree(self.run.folder.path, ignore_errors=True)

    def step(self) -> Measured:
        """One step: its seconds, its seconds by stage, the tokens sampled and the mean reward."""
        self._number += 1
        watch = Stopwatch()
        metrics = self.run.runner.step(self._number)
        spent = watch.read()
        stages = {name: metrics[f"time/{name}"] for name in TIMED if f"time/{name}" in metrics}
        return {
            **spent,
            "tokens": metrics["rollout/tokens"],
            "mean_reward": metrics["reward/mean"],
            "idle_share": metrics["train/idle_tokens"],
            **stages,
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
    reward: str = "checker",
) -> Recipe:
    """GRPO on sorting with the benchmark's model; everything else as the recipe's defaults have it."""
    written: dict[str, Any] = {
        "name": name,
        "model": {"path": str(model_folder())},
        "tasks": {"sort": {"kind": "sort", "options": {"length": list(digits)}}},
        "reward": {"functions": [{"use": reward, "batch": reward != "checker"}]},
        "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean"},
        "rollout": {"samples": samples, "max_new_tokens": max_new_tokens},
        "train": {"prompts": prompts, "lr": lr, "steps": 1000},
        "eval": {"rows": 1},
        "runtime": {"threads": threads},
    }
    return Recipe.model_validate(written)
