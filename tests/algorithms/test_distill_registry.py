"""The names of divergences, and what a recipe says of their combinations."""

from __future__ import annotations

from typing import get_args

import pytest

from practicum.recipe.checks.divergences import AS_REWARD, why_dead, why_unfit
from practicum.recipe.schema.teacher_sections import Distill, Divergence

from .batches import PAIRS

NAMES = get_args(Divergence)
SIGNALS = get_args(Distill.model_fields["signal"].annotation)
WAYS = get_args(Distill.model_fields["apply_as"].annotation)


def test_through_the_loss_fits_exactly_what_can_be_computed() -> None:
    fits = {(name, signal) for name in NAMES for signal in SIGNALS if why_unfit(name, signal, "loss") is None}
    assert fits == set(PAIRS)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "loss"])
def test_as_advantage_or_reward_fit_the_estimators_of_sampled_tokens(way: str) -> None:
    fits = {(name, signal) for name in NAMES for signal in SIGNALS if why_unfit(name, signal, way) is None}
    assert fits == {(name, "sampled") for name in AS_REWARD}
    assert all(why_dead(name, signal, way) is None for name in NAMES for signal in SIGNALS)


@pytest.mark.parametrize(
    ("divergence", "signal", "way", "advice"),
    [
        ("reverse_kl", "sampled", "loss", "use signal top_k or full, or k1_straight"),
        ("jsd", "sampled", "loss", "use signal top_k or full"),
        ("k2", "top_k", "loss", "use signal sampled, or divergence reverse_kl"),
        ("k1_straight", "sampled", "advantage", "use k1"),
        ("k3_straight", "full", "reward", "use k3 with signal sampled"),
        ("mse", "sampled", "reward", "use k1, k2 or k3 with signal sampled"),
        ("reverse_kl", "top_k", "advantage", "use k1, k2 or k3 with signal sampled"),
        ("k1", "top_k", "advantage", "use signal sampled"),
    ],
)
def test_a_refusal_says_what_to_use(divergence: str, signal: str, way: str, advice: str) -> None:
    reason = why_unfit(divergence, signal, way)
    assert reason is not None
    assert advice in reason
    assert divergence in reason


def test_plain_k1_is_dead_through_the_loss_alone() -> None:
    dead = {(n, s, w) for n in NAMES for s in SIGNALS for w in WAYS if why_dead(n, s, w) is not None}
    assert dead == {("k1", "sampled", "loss"), ("k1", "shared", "loss")}
    assert "k1_straight" in str(why_dead("k1", "sampled", "loss"))
