"""The recipe's options against differences between the engine that samples and the learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from practicum.recipe.schema.section import Section


class Reject(Section):
    """Which sessions are too far from the learner to learn from."""

    low: float = Field(
        ge=0, lt=1, description="Least geometric mean of the ratios of a session's tokens; 0 = no bound."
    )
    high: float = Field(gt=1, description="Largest such mean.")


class Mismatch(Section):
    """Importance weights: the learner's probability of a token before the update over the engine's."""

    weights: Literal["off", "token", "sequence"] = Field(
        default="off", description="A ratio for each token, or one for a session: the product of its tokens'."
    )
    outside: Literal["truncate", "mask"] = Field(
        default="truncate", description="A ratio above cap becomes cap; or outside of floor to cap, 0."
    )
    cap: float = Field(default=2.0, ge=1, description="Largest ratio.")
    floor: float = Field(
        default=0.0, ge=0, le=1, description="Least ratio, with outside: mask; 0 = no bound."
    )
    reject: Reject | None = Field(
        default=None, description="Leave out whole sessions by the geometric mean of their ratios."
    )
