"""The invariants, as pure functions that return a message for a violation, else None."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Ragged

_ROUNDING = 1e-6
"""Change of a learner's fingerprint above which its weights have changed."""
_ONE_TOKEN = 5.0
"""Maximum difference of one token, as a multiple of the mean difference."""
_WEIGHT = 0.01
"""Relative tolerance of a loss's summed weights, which have few digits in bfloat16."""
_EVEN = 1e-3
"""Maximum |sum| of a group's advantages, as a fraction of their sizes."""
_EQUAL = 1e-5
"""Relative difference below which rewards are equal."""
_SINGLE = 1e-6
"""Relative error of a mean in single precision."""


def weight_version(fresh: BatchRef, version: int) -> str | None:
    """Check that the engine sampled every token of a step with the step's weight version."""
    for key, tags in fresh:
        if tags.sampled_tokens and (tags.version_min, tags.version_max) != (version, version):
            return (
                f"{key} was sampled with weight versions {tags.version_min}–{tags.version_max}, "
                f"and the step is of version {version}: the engine missed an update"
            )
    return None


def fingerprint(
    found: Sequence[float],
    expected: Sequence[float],
    limit: float,
    before: tuple[Sequence[float], Sequence[float]] | None = None,
) -> str | None:
    """Check after a sync that the mean logprobs of a fixed sequence are equal in engine and learner.

    A single token may differ through rounding, where a model's numbers nearly cancel. The last token is
    checked separately, as it reveals a stale prefix cache. `before` holds both from the previous sync: if the
    engine's logprobs are unchanged but the learner's are not, the engine did not load the new weights.
    """
    gap, last = _mean_gap(found, expected), _mean_gap(found[-1:], expected[-1:])
    sentence = (
        f"stale or corrupt weights: after a sync, engine and learner differ by {gap:.3g} nats per token on a "
        f"fixed sequence (at most {limit:g} is expected)"
    )
    if before is not None:
        unmoved = list(found) == list(before[0]) and _mean_gap(expected, before[1]) > _ROUNDING
        if unmoved or (not gap <= limit and _mean_gap(found, before[1]) <= limit):
            return f"{sentence}; the engine still has the weights of before the update"
    if _mean_gap(found[:-1], expected[:-1]) <= limit < last / _ONE_TOKEN:
        cached = f"by {last:.3g} on one after a cached prompt: its prefix cache is of older weights"
        return f"{sentence}, and {cached}"
    return None if gap <= limit else sentence


def _mean_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean |difference|, or infinity if one is NaN."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else sum(gaps) / max(1, len(gaps))


def logprob_gap(metrics: Mapping[str, float], limit: float) -> str | None:
    """Check that engine and learner agree on the logprobs of fresh tokens."""
    gap = metrics.get("gap_mean")
    if gap is None or gap <= limit:
        return None
    return (
        f"rollout and learner logprobs differ by {gap:.3g} nats per token on average "
        f"(at most {metrics.get('gap_max', math.nan):.3g}); checks.logprob_gap_max is {limit:g}. "
        "Engine and learner differ in weights, numerics or sampling settings"
    )


SAMPLE_SIZE_MIN = 0.5
"""Minimum effective sample size of stale rows, as a fraction of their tokens."""


def sample_size(metrics: Mapping[str, float]) -> str | None:
    """Check that rows sampled by older weights are close enough to the current policy."""
    size = metrics.get("sample_size")
    if size is None or size >= SAMPLE_SIZE_MIN:
        return None
    return (
        f"the effective sample size is {size:.0%} of the batch's tokens, expected at least "
        f"{SAMPLE_SIZE_MIN:.0%}: the policy that sampled them is far from the current one, and training may "
        "collapse. Lower train.lr or rollout.lag"
    )


def masks(batch: BatchRef, prompt_ids: Ragged, response_ids: Ragged, mask: Ragged) -> str | None:
    """Check the lengths and sampled tokens of columns against the tags."""
    columns = zip(batch, prompt_ids.lengths, response_ids.lengths, mask.rows, strict=True)
    for (key, tags), prompt, response, row in columns:
        found = (prompt, response, row.shape[0], int(row.sum()))
        expected = tags.prompt_tokens, tags.response_tokens, tags.response_tokens, tags.sampled_tokens
        if found != expected:
            return (
                f"{key} has {found[0]} prompt, {found[1]} response, {found[2]} mask and {found[3]} "
                f"sampled tokens; its tags say {expected}"
            )
    return None


def passes(batch: BatchRef, optimizer_steps: Sequence[Sequence[int]], epochs: int) -> str | None:
    """Check that each sampled row is in one optimizer step per pass over the batch."""
    seen = Counter(row for rows in optimizer_steps for row in rows)
    for row, (key, tags) in enumerate(batch):
        if tags.sampled_tokens and seen[row] != epochs:
            return (
                f"{key} is in {seen[row]} optimizer steps of its batch, expected {epochs}: one in each pass"
            )
    return None


def denominator(counted: float | None, expected: int) -> str | None:
    """Check that the loss was divided by the batch's number of tokens."""
    if counted is None or int(counted) == expected:
        return None
    return f"the loss counted {int(counted)} sampled tokens, the batch has {expected}"


def loss_weights(found: float, expected: float) -> str | None:
    """Check that the weights of all trained tokens sum to the aggregation's value."""
    if abs(found - expected) <= _WEIGHT * expected:
        return None
    return (
        f"the token weights of the loss sum to {found:.4g}, expected {expected:.4g}: some tokens are "
        "left out, counted twice, or divided by a count of less than the whole mini-batch"
    )


def advantages(batch: BatchRef, values: Ragged, mask: Ragged) -> str | None:
    """Check that sessions above their group's mean reward have positive advantages, which sum to 0 per group.

    For estimators with centred advantages. Uses the rewards in the tags. Groups with a row without sampled
    tokens are skipped.
    """
    row_N = torch.arange(len(mask)).repeat_interleave(torch.tensor(mask.lengths))
    sampled_2N = torch.stack([values.values.double().masked_fill(~mask.values, 0.0), mask.values.double()])
    sums, counts = torch.zeros(2, len(mask), dtype=torch.float64).index_add(1, row_N, sampled_2N).tolist()
    statistics_of: dict[int, dict[int, tuple[float, float, float]]] = {}
    left_out: set[int] = set()
    for (key, tags), total, count in zip(batch, sums, counts, strict=True):
        if tags.reward is None or not count:
            left_out.add(key.prompt)
            continue
        _, before, tokens = statistics_of.setdefault(key.prompt, {}).get(key.session, (0.0, 0.0, 0.0))
        statistics_of[key.prompt][key.session] = tags.reward, before + total, tokens + count
    findings = (_group(prompt, group) for prompt, group in statistics_of.items() if prompt not in left_out)
    return next(filter(None, findings), None)


def _group(prompt: int, sessions: Mapping[int, tuple[float, float, float]]) -> str | None:
    """Check a group from the reward, summed advantage and tokens of each session."""
    rewards = [reward for reward, _, _ in sessions.values()]
    mean, largest = sum(rewards) / len(rewards), max(1.0, *map(abs, rewards))
    least = _EQUAL * largest
    each = {session: total / tokens for session, (_, total, tokens) in sessions.items()}
    for (session, value), reward in zip(each.items(), rewards, strict=True):
        apart = reward - mean
        if math.isnan(value) or (abs(apart) > least and value * apart <= 0):
            return (
                f"prompt {prompt}/session {session} has the reward {reward:.4g}, its group's mean is "
                f"{mean:.4g}, and its advantage is {value:.4g}: the estimator compared other sessions or "
                "rewards"
            )
    total, size = sum(each.values()), sum(map(abs, each.values()))
    spread = sum(abs(reward - mean) for reward in rewards)
    # The rounding of a mean of large rewards can exceed their small differences.
    rounding = _SINGLE * largest * len(rewards) / spread if spread else 0.0
    if abs(total) <= (_EVEN + rounding) * size:
        return None
    return (
        f"the advantages of prompt {prompt}'s {len(each)} sessions add up to {total:.4g}, expected 0: the "
        "group's mean is not that of its sessions"
    )


def groups(batch: BatchRef, samples: int) -> str | None:
    """Check that each prompt has all its sessions, including failed ones."""
    sessions = Counter(prompt for prompt, _ in {key[:2] for key in batch.keys})
    for prompt, count in sessions.items():
        if count != samples:
            return f"prompt {prompt} has {count} sessions, expected {samples}"
    return None


def drawn(
    prompts: Sequence[int], rolled: Sequence[BatchRef], batch: BatchRef, *, filters: bool
) -> str | None:
    """Check that each prompt was rolled out and, unless a session failed or it is filtered, trained on."""
    rows = [row for one in rolled for row in one]
    sampled, learnt = {key.prompt for key, _ in rows}, {key.prompt for key in batch.keys}
    excused = {key.prompt for key, tags in rows if filters or tags.status == "failed"}
    for prompt in prompts:
        if prompt not in sampled:
            return f"prompt {prompt} was drawn for the step and has no sessions"
        if prompt not in learnt and prompt not in excused:
            return (
                f"prompt {prompt} was drawn for the step, none of its sessions failed, but the step does not "
                "train on it"
            )
    return None


def store_empty(held: int) -> str | None:
    """Check that the store holds no rows of finished steps."""
    return None if not held else f"{held} rows of finished steps are in the store after the step"
