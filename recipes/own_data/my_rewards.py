"""Reward functions: one number for each session."""

import asyncio

from practicum.rewards.reward_functions import RewardSample


def in_place(sample: RewardSample) -> float:
    """Share of the letters that stand where the answer has them. One call at a time, in a thread."""
    pairs = zip(sample.response_text, str(sample.answer), strict=False)
    return sum(a == b for a, b in pairs) / max(len(sample.response_text), len(str(sample.answer)))


async def ended(sample: RewardSample) -> float:
    """Awaited for up to 64 sessions at once, while others roll out: for judges behind a network."""
    await asyncio.sleep(0)
    return float(sample.finish == "stop")


def shortest(samples: list[RewardSample]) -> list[float]:
    """With `batch: true`: once for all samples of a rollout; one number for each, in order."""
    lengths = [len(sample.response_text) for sample in samples]
    return [float(length == min(lengths)) for length in lengths]
