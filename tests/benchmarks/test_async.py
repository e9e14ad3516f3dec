"""What the benchmark of lags counts, and what its report says."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.async_evidence import collapsed_at, is_late
from benchmarks.report_async import async_evidence, async_step

from practicum.tasks.prompts import Prompt

MACHINE = {"processor": "one", "cores": 2}


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.5, 0.6, 0.2, 0.1, 0.1, 0.0, 0.2], 3),
        ([0.5, 0.6, 0.2, 0.1, 0.1, 0.0], None),  # for four steps: it may be a dip
        ([0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.2], None),
        ([0.5, 0.1, 0.5, 0.1, 0.1, 0.1, 0.6], None),
        ([0.0] * 8, None),
        ([0.5, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3], None),
    ],
)
def test_a_collapse_is_a_fall_that_stays(rewards: list[float], step: int | None) -> None:
    assert collapsed_at(rewards) == step


def test_long_prompts_are_late_more_often() -> None:
    def late(task: str) -> int:
        return sum(is_late(Prompt(uid, task, task, "", "", {}, 0, uid)) for uid in range(400))

    assert late("short") < 40 < 200 < late("long") < 280


def test_the_report_compares_with_the_best_synchronous_way() -> None:
    def rounds(seconds: float) -> list[dict[str, float]]:
        return [{"seconds": seconds, "cpu_seconds": seconds, "waited": 0.1}] * 2

    raced = {"sync, 1 thread": rounds(2.0), "sync, 2 threads": rounds(1.8), "lag 1": rounds(1.2)}
    scores = {
        name: [{"step": 0, "score": 0.1, "seconds": 0}, {"step": 4, "score": 0.4, "seconds": 9}]
        for name in raced
    }
    goals = {"grpo": {"lag 1": 1.5}}
    told = async_step({"machine": MACHINE, "raced": {"grpo": raced}, "goals": goals, "scores": scores})
    assert "1.5× (1.5 to 1.5) · goal 1.5× reached" in told
    assert "steps until 0.40" in told


def test_the_report_says_when_the_check_spoke_and_when_the_reward_fell() -> None:
    run: dict[str, Any] = {"way": "lag 4", "lr": 1e-3, "rewards": [0.5, 0.1], "sizes": [None, 0.2]}
    run |= {"warned": 2, "collapsed": 2}
    names = ("first greedy/long", "greedy/long", "first greedy/short", "greedy/short")
    dropping = {"dropping": dict.fromkeys(names, 0.5) | {"long trained": 0.2}}
    settings = {"late": {"long": 0.6, "short": 0.05}, "lag": 4, "collapse_steps": 2}
    found = {"machine": MACHINE, "settings": settings, "dropping": dropping, "weights": {"lag 4": run}}
    assert "| 0.001 | lag 4 | 0.50 | 0.30 | 0.20 | 2 | 2 |" in async_evidence(found)
