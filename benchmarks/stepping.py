"""A practicum run whose steps are taken one at a time: the real step of a real recipe."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.harness import Measured, Stopwatch
from benchmarks.model import CACHE, model_folder
from practicum.observe.progress import ProgressView
from practicum.recipe.schema.recipe import Recipe
from practicum.trainer.run import Trainer
from practicum.trainer.run_folder import RunFolder

TIMED = (
    *("rollout", "reward", "teachers", "pad", "old_logprobs", "advantages", "update_student"),
    *("sync", "clear"),
)
METRICS = {
    "mean_reward": "reward/mean",
    "idle_share": "train/idle_tokens",
    "distill_loss": "train/distill_loss",
    "hidden": "teachers/overlap_fraction",
    "padding_rows": "padding/rows",
    "gradient": "train/grad_norm",
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
            gc.collect()
            gc.freeze()
        stages = {name: metrics[f"time/{name}"] for name in TIMED if f"time/{name}" in metrics}
        more = {name: metrics[key] for name, key in METRICS.items() if key in metrics}
        scoring = [metrics.get(f"teacher/{name}/seconds", 0.0) for name in self.run.recipe.teachers]
        return {
            **spent,
            "tokens": metrics["rollout/tokens"],
            **more,
            **({"scoring": sum(scoring)} if scoring else {}),
            **stages,
        }


def mean(steps: Sequence[Measured]) -> Measured:
    """Mean of each number over the steps."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


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
    minibatch_size: int | None = None,
    hybrid: bool = False,
) -> Recipe:
    """GRPO on sorting with the benchmark's model; everything else as the recipe's defaults have it."""
    common = _common(name, prompts, samples, max_new_tokens, lr, threads, hybrid=hybrid)
    written: dict[str, Any] = {
        **common,
        "train": {**common["train"], "minibatch_size": minibatch_size},
        "tasks": {"sort": _sorting(digits)},
        "reward": {"functions": [{"use": reward, "batch": reward != "checker"}]},
        "algorithm": {"advantage": "grpo", "loss": "ppo_clip", "aggregation": "token_mean"},
    }
    return Recipe.model_validate(written)


def make_distillation(
    name: str,
    teachers: Mapping[str, Mapping[str, Any]],
    *,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    digits: tuple[int, int],
    lr: float,
    signal: str = "top_k",
    tasks: Sequence[str] = ("sort",),
    threads: int = 1,
) -> Recipe:
    """Reverse KL to the teachers and nothing else; several go by the tasks' names."""
    written: dict[str, Any] = {
        **_common(name, prompts, samples, max_new_tokens, lr, threads),
        "tasks": {task: _sorting(digits) for task in tasks},
        "teachers": teachers,
        "reward": {"weight": 0.0},
        "distill": {"divergence": "reverse_kl", "signal": signal},
    }
    return Recipe.model_validate(written)


def _common(
    name: str,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    lr: float,
    threads: int,
    *,
    hybrid: bool = False,
) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"path": str(model_folder(hybrid=hybrid))},
        "rollout": {"samples": samples, "max_new_tokens": max_new_tokens},
        "train": {"prompts": prompts, "lr": lr, "steps": 1000},
        "eval": {"rows": 1},
        "runtime": {"threads": threads},
    }


def _sorting(digits: tuple[int, int]) -> dict[str, Any]:
    return {"kind": "sort", "options": {"length": list(digits)}}
