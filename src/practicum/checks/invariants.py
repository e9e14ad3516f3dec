"""The invariants, as pure functions: each gives a sentence where something is wrong, else None."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Ragged

_ROUNDING = 1e-6
"""A learner whose fingerprint moved by more has other weights."""
_ONE_TOKEN = 5.0
"""How many times as far off as all on average one token may be."""


def weight_version(fresh: BatchRef, version: int) -> str | None:
    """The engine sampled every token of a fresh rollout with the weights that the learner has."""
    for key, tags in fresh:
        if tags.sampled_tokens and (tags.version_min, tags.version_max) != (version, version):
            return (
                f"{key} was sampled with weight versions {tags.version_min}–{tags.version_max}, "
                f"the learner is at {version}: the engine missed an update"
            )
    return None


def fingerprint(
    found: Sequence[float],
    expected: Sequence[float],
    limit: float,
    before: tuple[Sequence[float], Sequence[float]] | None = None,
) -> str | None:
    """After a sync, the engine's logprobs of a fixed sequence are the learner's, on average.

    One token may be far off by rounding alone, where a model's numbers nearly cancel. The last is looked at
    by itself: it tells of what the engine keeps. `before` are both of the sync before this one: an engine
    that says the very same as then, while the learner has moved, has not taken the new weights, however
    little they differ.
    """
    gap, last = _mean_gap(found, expected), _mean_gap(found[-1:], expected[-1:])
    told = (
        f"stale or corrupt weights: after a sync, engine and learner differ by {gap:.3g} nats per token on a "
        f"fixed sequence (checks.fingerprint_max is {limit:g})"
    )
    if before is not None:
        unmoved = list(found) == list(before[0]) and _mean_gap(expected, before[1]) > _ROUNDING
        if unmoved or (not gap <= limit and _mean_gap(found, before[1]) <= limit):
            return f"{told}; the engine still has those of before the update"
    if _mean_gap(found[:-1], expected[:-1]) <= limit < last / _ONE_TOKEN:
        return (
            f"{told}, and by {last:.3g} on one that follows a prompt it knew: its prefix cache is of older "
            "weights"
        )
    return None if gap <= limit else told


def _mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean |difference|; what is no number is as far off as can be."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else sum(gaps) / max(1, len(gaps))


def logprob_gap(metrics: Mapping[str, float], limit: float) -> str | None:
    """Rollout and learner agree on the logprobs of fresh tokens."""
    gap = metrics.get("gap_mean")
    if gap is None or gap <= limit:
        return None
    return (
        f"rollout and learner logprobs differ by {gap:.3g} nats per token on average "
        f"(at most {metrics.get('gap_max', math.nan):.3g}); checks.logprob_gap_max is {limit:g}. "
        "The engine's weights, numbers or sampling settings are not the learner's"
    )


def masks(batch: BatchRef, prompt_ids: Ragged, response_ids: Ragged, mask: Ragged) -> str | None:
    """Columns have the lengths and sampled tokens that the tags say."""
    columns = zip(batch, prompt_ids.lengths, response_ids.lengths, mask.rows, strict=True)
    for (key, tags), prompt, response, row in columns:
        found = (prompt, response, row.shape[0], int(row.sum()))
        expected = (
            tags.prompt_tokens,
            tags.response_tokens,
            tags.response_tokens,
            tags.sampled_tokens,
        )
        if found != expected:
            return (
                f"{key} has {found[0]} prompt, {found[1]} response, {found[2]} mask and {found[3]} "
                f"sampled tokens; its tags say {expected}"
            )
    return None


def denominator(counted: float | None, expected: int) -> str | None:
    """The loss was divided by the number of tokens that the batch really has."""
    if counted is None or int(counted) == expected:
        return None
    return f"the loss counted {int(counted)} sampled tokens, the batch has {expected}"


def groups(batch: BatchRef, samples: int) -> str | None:
    """Each prompt has the sessions it should have, failed ones included."""
    sessions = Counter(prompt for prompt, _ in {key[:2] for key in batch.keys})
    for prompt, count in sessions.items():
        if count != samples:
            return f"prompt {prompt} has {count} sessions, expected {samples}"
    return None


def store_empty(held: int, waiting: int) -> str | None:
    """After a step the store holds what waits in the buffer and nothing else."""
    if held == waiting:
        return None
    return f"{held} rows are in the store after the step, {waiting} wait in the buffer"
