"""What a recipe's `expected` says in words, as a band that a chart can shade."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NUMBER = r"(\d+(?:\.\d+)?)"
_METRIC = r"^(?:(?P<metric>eval/[\w@/]+) )?"
_BETWEEN = re.compile(rf"{_METRIC}{_NUMBER} to {_NUMBER}(?! steps)")
_RISE = re.compile(rf"{_METRIC}at least {_NUMBER} above the (?:start|base model)(?:, or {_NUMBER})?")
_LEAST = re.compile(rf"{_METRIC}at least {_NUMBER}(?! of| above)")
_BELOW = re.compile(rf"{_METRIC}below {_NUMBER}")
_FROM = re.compile(rf"{_METRIC}from {_NUMBER} to {_NUMBER} or more")
_AFTER = re.compile(rf"{_METRIC}{_NUMBER} after (\d+) to (\d+) steps")


@dataclass(frozen=True, slots=True)
class Band:
    """Where a metric should end: at least `low`, at most `high`; None is open. `metric` None: any score."""

    metric: str | None
    low: float | None
    high: float | None


def expected_band(text: object, first: Mapping[str, float]) -> Band | None:
    """The band of an `expected` sentence; None if it names none that can be drawn.

    `first` are the scores before training, which "above the start" counts from.
    """
    for pattern in (_AFTER, _FROM, _RISE, _BETWEEN, _LEAST, _BELOW):
        match = pattern.match(text if isinstance(text, str) else "")
        if match is not None:
            return _band(pattern, match, first)
    return None


def _band(pattern: re.Pattern[str], match: re.Match[str], first: Mapping[str, float]) -> Band | None:
    metric = match["metric"]
    numbers = [float(number) if number is not None else None for number in match.groups()[1:]]
    low = numbers[0]
    if pattern is _BETWEEN:
        return Band(metric, low, numbers[1])
    if pattern is _BELOW:
        return Band(metric, None, low)
    if pattern is _FROM:
        return Band(metric, numbers[1], None)
    if pattern is _RISE:
        start = first.get(metric or "eval/greedy", first.get("eval/greedy"))
        if start is None or low is None:
            return None
        ceiling = numbers[1] if numbers[1] is not None else start + low
        return Band(metric, min(start + low, ceiling), None)
    return Band(metric, low, None)
