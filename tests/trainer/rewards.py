"""Reward functions that recipes in tests name."""

import os
import random
import signal

from practicum.rewards.reward_functions import RewardSample

from .kill_orders import obey


def even_length(sample: RewardSample) -> float:
    return float(len(sample.response_text) % 2 == 0)


def fails_on_odd_sessions(sample: RewardSample) -> float:
    if "session 1/" in sample.key or "session 3/" in sample.key:
        raise ValueError("odd session")
    return float(len(sample.response_text))


def fails_on_the_first_prompts_baseline(sample: RewardSample) -> float:
    if "prompt 0/session 4/" in sample.key:
        raise ValueError("no baseline")
    return float(len(sample.response_text))


def at_random(sample: RewardSample) -> float:
    return random.random()


def by_letters(sample: RewardSample) -> float:
    """Differs between almost any two answers."""
    return sum(map(ord, sample.response_text)) % 7 / 6


def mortal(sample: RewardSample) -> float:
    """As by_letters; if `reward` is ordered, the process dies of it; of `stop`, it hangs."""
    obey("reward")
    obey("stop", signal.SIGSTOP)
    return by_letters(sample)


def answer_length(sample: RewardSample) -> float:
    """The letters of the last turn, if the prompt and the helper's turn are where they belong."""
    assert sample.trajectories == 2
    assert sample.prompt_text.startswith(("copy:", "compare:")), sample.prompt_text
    assert sample.turns[-1] == sample.response_text
    return float(len(sample.response_text))


def lazy_then_broken(sample: RewardSample) -> float:
    """As breaks_late, with a random part."""
    return breaks_late(sample) + random.random() / 10


def nothing(sample: RewardSample) -> float:
    """The same for every answer."""
    return 0.0


def breaks_late(sample: RewardSample) -> float:
    """As by_letters; from prompt 12 on it raises, unless REWARD_IS_MENDED is set."""
    if int(sample.key.split("/")[0].removeprefix("prompt ")) >= 12 and not os.environ.get("REWARD_IS_MENDED"):
        raise ValueError("cannot parse this")
    return by_letters(sample)
