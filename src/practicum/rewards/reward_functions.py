"""The built-in reward functions, which `recipe/reward_traits.py` lists."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from practicum.errors import DataError
from practicum.tasks.prompts import answer_text


@dataclass(frozen=True, slots=True)
class RewardSample:
    """Argument of a reward function: a finished session and its prompt. `response_text` is the student's last
    turn. `turns` has all turns of all trajectories."""

    prompt_text: str
    response_text: str
    answer: Any
    row: Mapping[str, Any]
    task: str
    domain: str
    finish: str
    key: str
    response_tokens: int
    turns: tuple[str, ...] = ()
    trajectories: int = 1


def exact(sample: RewardSample) -> float:
    """Return 1.0 if the response equals the answer, ignoring surrounding whitespace."""
    return float(sample.response_text.strip() == answer_text(sample.answer).strip())


def contains(sample: RewardSample) -> float:
    """Return 1.0 if the response contains the answer."""
    return float(answer_text(sample.answer).strip() in sample.response_text)


def math_verify(sample: RewardSample) -> float:
    """Return 1.0 if response and answer are mathematically equal (GSM8K format: the part after ####)."""
    from math_verify import parse, verify

    # Silences the warning about its disabled timeout, which uses signals and fails in threads.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    answer = answer_text(sample.answer).rpartition("####")[2].strip()
    marked = "$" in answer or "\\boxed" in answer
    gold = read(answer if marked else f"${answer}$") or read(answer)
    if not gold:
        raise DataError(f"math-verify can't read the answer {answer!r}")
    return float(verify(gold, read(sample.response_text.rpartition("####")[2]), timeout_seconds=None))


def reasoning_gym(sample: RewardSample) -> float:
    """Return the score of the response, or of its <answer>…</answer> part, from the row's dataset."""
    from reasoning_gym.utils import extract_answer

    name, entry = find_entry(sample.row)
    answer = extract_answer(sample.response_text)
    return _gym_scorer(name)(sample.response_text.strip() if answer is None else answer, entry)


@cache
def _gym_scorer(name: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)


def find_entry(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the dataset's name and the entry in a reasoning-gym row. Raise DataError without them.

    Either the row is an entry as the package makes it (answer, metadata with source_dataset), or
    its columns `dataset` and `entry` hold them. Metadata and entry may be JSON text.
    """
    entry = _as_mapping(row.get("entry", row))
    metadata = _as_mapping(entry.get("metadata", {}))
    name = row.get("dataset") or metadata.get("source_dataset")
    if not isinstance(name, str) or "answer" not in entry:
        raise DataError(
            "reward reasoning_gym needs columns answer and metadata (with source_dataset), as its "
            f"entries have them, or dataset and entry; the row has {', '.join(row) or 'none'}"
        )
    return name, {**entry, "metadata": metadata}


def _as_mapping(value: Any) -> dict[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    return dict(value) if isinstance(value, Mapping) else {}
