"""A whole GRPO step: practicum beside TRL's GRPOTrainer, same model, task, batch and optimizer.

32 prompts of sorting × 8 samples, at most 32 new tokens, one optimizer step per batch, no KL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import plots, trl_peer
from benchmarks.harness import Channel
from benchmarks.model import DIGITS, examples, model_folder
from benchmarks.stepping import GRPO, Steps, make_recipe, mean
from practicum.recipe.schema.recipe import Recipe

SIZES: dict[str, Any] = {"prompts": 32, "samples": 8, "max_new_tokens": 32, "digits": DIGITS, "lr": 1e-5}
ROUNDS, BLOCK = {1: 3, 2: 3}, 2
"""Rounds by threads, and the steps that a contender takes in one turn."""


def recipe_of(name: str, threads: int, hybrid: bool = False) -> Recipe:
    """The recipe whose step is measured."""
    return make_recipe(name, **SIZES, threads=threads, hybrid=hybrid, **GRPO)


def practicum(channel: Channel, threads: int, hybrid: bool = False) -> None:
    """The step of `practicum train`, all run-time checks on."""
    with Steps(recipe_of("grpo_step", threads, hybrid)) as steps:
        channel.serve(lambda turn: mean([steps.step() for _ in range(BLOCK)]))


def trl(channel: Channel, threads: int, hybrid: bool = False) -> None:
    """GRPOTrainer on the same tasks."""
    rows = [{"prompt": e.prompt, "answer": e.answer} for e in examples(2, 0, 4096, DIGITS)]
    samples = SIZES["samples"]
    settings = trl_peer.settings(SIZES["prompts"] * samples, SIZES["max_new_tokens"], SIZES["lr"])
    folder = model_folder(hybrid=hybrid)
    trl_peer.train_grpo(channel, threads, BLOCK, folder, rows, settings, samples, is_sorted)


def is_sorted(answer: str, expected: str) -> float:
    return float(answer.strip() == expected)


def race(name: str, rounds: Mapping[int, int], *, hybrid: bool = False) -> dict[str, Any]:
    """Race both, and write the results."""
    model_folder(hybrid=hybrid)
    settings = {**SIZES, "steps_per_round": BLOCK}
    return trl_peer.race(name, "benchmarks.grpo_step", rounds, settings, hybrid=hybrid)


if __name__ == "__main__":
    plots.bars(race("grpo_step", ROUNDS), "seconds", "seconds per GRPO step", "grpo_step")
