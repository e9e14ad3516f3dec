"""The table of built-in reward functions. To add one, write a line here and its function in
rewards/reward_functions.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from practicum.recipe.schema.recipe import Recipe, RewardFunction


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """Traits of a reward function: whether rows need an answer, and whether it is called without a thread.

    `extra` is the optional package that it needs: the module and the extra's name.
    """

    needs_answer: bool = True
    instant: bool = False
    extra: tuple[str, str] | None = None


REWARDS: Mapping[str, RewardTraits] = {
    "checker": RewardTraits(instant=True),
    "exact": RewardTraits(instant=True),
    "contains": RewardTraits(instant=True),
    "math_verify": RewardTraits(extra=("math_verify", "math")),
    "reasoning_gym": RewardTraits(needs_answer=False, extra=("reasoning_gym", "reasoning-gym")),
}


def is_instant(use: str) -> bool:
    """Return True for a pure and fast built-in, which has no time limit."""
    return use in REWARDS and REWARDS[use].instant


def functions_of(recipe: Recipe, task: str) -> list[RewardFunction]:
    """Return the reward functions of a task: its own, else the recipe's."""
    own = recipe.tasks[task].rewards
    return recipe.reward.functions if own is None else own


def tasks_needing_answer(recipe: Recipe) -> set[str]:
    """Return the tasks whose rows must have an answer: for a reward, a loop or a demonstration."""
    needed = recipe.algorithm.loss == "supervised" or recipe.agent.loop == "retry"
    return {
        name
        for name in recipe.tasks
        if needed or any(f.use in REWARDS and REWARDS[f.use].needs_answer for f in functions_of(recipe, name))
    }
