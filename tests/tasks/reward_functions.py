"""Reward functions as users write them, named in tests by tests' recipes."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import torch

from practicum.rewards.score_functions import RewardSample

BUILT_AT = "not a function"
calls: list[str] = []


def length(sample: RewardSample) -> float:
    return len(sample.response_text) / 10


async def slow_length(sample: RewardSample) -> float:
    await asyncio.sleep(0.001 * (10 - len(sample.response_text)))
    return len(sample.response_text) / 10


def around_async(sample: RewardSample) -> Any:
    return slow_length(sample)


class Weigher:
    async def __call__(self, sample: RewardSample) -> bool:
        return sample.response_text == "aa"


weigher = Weigher()


def batch_length(samples: list[RewardSample]) -> np.ndarray:
    calls.append(f"batch of {len(samples)}")
    return np.array([len(sample.response_text) for sample in samples])


async def async_batch(samples: list[RewardSample]) -> list[float]:
    return [float(len(samples))] * len(samples)


def batch_too_few(samples: list[RewardSample]) -> list[float]:
    return [1.0]


def batch_with_nan(samples: list[RewardSample]) -> list[float]:
    return [float("nan") if s.response_text == "bad" else 1.0 for s in samples]


def picky(sample: RewardSample) -> float:
    calls.append(sample.response_text)
    if sample.response_text == "bad":
        raise ValueError("I do not like it")
    return 1.0


async def picky_async(sample: RewardSample) -> float:
    return picky(sample)


def misnames(sample: RewardSample) -> float:
    return len(sample.response)  # pyright: ignore[reportAttributeAccessIssue]


def leaves(sample: RewardSample) -> float:
    sys.exit("bye")


release = threading.Event()


def stuck(sample: RewardSample) -> float:
    calls.append(sample.response_text)
    if sample.response_text == "bad":
        release.wait(60)
    return 1.0


async def stuck_async(sample: RewardSample) -> float:
    if sample.response_text == "bad":
        await asyncio.sleep(60)
    return 1.0


async def deaf(sample: RewardSample) -> float:
    """Swallows its cancellation, as a blanket except around an await does."""
    for _ in range(2):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            calls.append("cancelled")
    return 1.0


VALUES: dict[str, Any] = {
    "true": True,
    "int": 2,
    "numpy": np.float32(0.5),
    "numpy bool": np.bool_(True),
    "torch": torch.tensor(0.25),
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 1e39,
    "huge int": 10**400,
    "none": None,
    "text": "1.0",
    "list": [1.0],
    "complex": 1j,
    "vector": np.array([1.0, 2.0]),
}


def value(sample: RewardSample) -> Any:
    return VALUES[sample.response_text]


def trl_reward(completions, solution, scale=1.0, **columns):
    return [scale * float(text == solution[i]) for i, text in enumerate(completions)]


def two_arguments(prompt, response):
    return 1.0
