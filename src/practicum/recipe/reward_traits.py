"""The table of built-in reward functions. To add one, write a line here and its function in
rewards/reward_functions.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
