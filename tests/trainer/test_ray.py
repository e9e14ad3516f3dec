"""The same recipe on Ray: the same rewards, losses and weights as in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.trainer.run import train_loaded
from tests.cluster import local_ray

from .recipes import TINY, tiny
from .test_run import metrics_of, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]

TIMED = re.compile(
    r"time/.*|rollout/tokens_per_second|teacher/.*/seconds|teachers/hidden|balance/.*|padding/.*"
)
"""Metrics that the clock or the number of ranks makes."""
STEPS = {"steps": 3, "prompts": 4, "lr": 1e-3, "eps": 1e-3}
"""AdamW divides by the gradient's size: where that is nothing, eps decides how far rounding is blown up."""
REWARD = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}
GRPO = {"reward": REWARD, "train": STEPS | {"epochs": 2}, "algorithm": {"kl": {"place": "loss"}}}
PPO = {
    "reward": REWARD,
    "algorithm": {"advantage": "gae"},
    "critic": {},
    "train": STEPS | {"minibatches": 2},
    "rollout": TINY["rollout"] | {"samples": 3},
    "agent": {"loop": "tests.trainer.loops:uneven"},
}


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with local_ray(cpus=12):
        yield


def on_ray(sections: dict[str, Any], *, ranks: int, store: str) -> dict[str, Any]:
    """The same sections with nothing changed but the runtime."""
    runtime = {"kind": "ray", "threads": 1, "store": {"kind": store}, "start_s": 120}
    return sections | {"runtime": runtime, "pools": {"train": {"devices": ranks}}}


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without what differs by nature."""
    return [{k: v for k, v in row.items() if not TIMED.fullmatch(k)} for row in metrics_of(folder)]


def assert_same_run(one: Path, other: Path, tolerance: float) -> None:
    """Metrics and weights agree: exactly, if the tolerance is 0."""
    rows = [
        [{k: v for k, v in row.items() if not TIMED.fullmatch(k)} for row in metrics_of(f)]
        for f in (one, other)
    ]
    for a, b in zip(*rows, strict=True):
        assert a == pytest.approx(b, abs=1e-6, rel=1e-6)
    here, there = weights_of(one), weights_of(other)
    assert here.keys() == there.keys()
    for name, weight in here.items():
        torch.testing.assert_close(weight, there[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("store", ["ray", "transferqueue"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_ray_is_the_local_run(tmp_path: Path, ranks: int, store: str):
    sections = GRPO if ranks == 1 else PPO
    train_loaded(tiny(tmp_path, **sections), tmp_path / "local")
    train_loaded(tiny(tmp_path, **on_ray(sections, ranks=ranks, store=store)), tmp_path / "ray")
    assert_same_run(tmp_path / "local", tmp_path / "ray", 0.0 if ranks == 1 else 1e-6)
