"""Which divergence goes with which signal and which way of learning, and why the others don't."""

from __future__ import annotations

from typing import get_args

from practicum.recipe.schema.teacher_sections import ON_DISTRIBUTIONS, Divergence

ON_SAMPLED = frozenset(get_args(Divergence)) - ON_DISTRIBUTIONS
"""Divergences of the sampled token's logprob (signal sampled)."""
AS_REWARD = ("k1", "k2", "k3")
"""Divergences whose negative value may be a token's advantage or reward."""

_PLAIN = {"k1_straight": "k1", "k3_straight": "k3"}


def why_unfit(divergence: str, signal: str, through: str) -> str | None:
    """Why this divergence can't be had from this signal or used in this way, and what to use; else None."""
    if through != "loss":
        return _why_no_reward(divergence, signal, through)
    if divergence in ON_DISTRIBUTIONS and signal == "sampled":
        also = ", or k1_straight, which has the gradient of the reverse KL, on average"
        return (
            f"{divergence} compares distributions, and signal sampled gives the logprob of one token: "
            f"use signal top_k or full{also if divergence == 'reverse_kl' else ''}"
        )
    if divergence in ON_SAMPLED and signal != "sampled":
        return (
            f"{divergence} compares the logprobs of the sampled token alone, and what signal {signal} gives "
            f"would be ignored: use signal sampled, or divergence reverse_kl, forward_kl or jsd"
        )
    return None


def why_dead(divergence: str, signal: str, through: str) -> str | None:
    """Why the gradient of this combination can't depend on the teacher, with what to use; None if it can."""
    if (divergence, signal, through) != ("k1", "sampled", "loss"):
        return None
    return f"{why_k1_is_dead('teacher')}; use k1_straight, or k1 with through advantage"


def why_k1_is_dead(other: str) -> str:
    """Why k1 to the teacher or the reference has no place in a loss."""
    return (
        f"the gradient of k1 = log student - log {other} is that of log student alone: "
        f"the {other} falls out, and nothing is learnt from it"
    )


def _why_no_reward(divergence: str, signal: str, through: str) -> str | None:
    """As `why_unfit`, where the negative estimate is a token's advantage or reward."""
    if divergence in _PLAIN:
        plain = _PLAIN[divergence]
        return (
            f"{divergence} differs from {plain} only in its gradient, and through {through} none is taken: "
            f"use {plain}" + ("" if signal == "sampled" else " with signal sampled")
        )
    if divergence not in AS_REWARD:
        return (
            f"through {through} takes an estimate of the reverse KL for each sampled token, and {divergence} "
            "is none: use k1, k2 or k3 with signal sampled"
        )
    if signal != "sampled":
        return (
            f"{divergence} compares the logprobs of the sampled token alone, and what signal {signal} gives "
            f"would be ignored: use signal sampled"
        )
    return None
