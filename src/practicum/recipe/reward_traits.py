"""The table of built-in reward functions. To add one, write a line here and its function in
rewards/reward_functions.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """Requirements of a reward function: rows with an answer, and a thread for its calls. `extra` is the
    optional package that it needs: the module and the extra's name."""

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
