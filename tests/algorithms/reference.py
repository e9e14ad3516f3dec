"""The algorithms, slow and as plain as their formulas: Python loops over Python floats."""

from __future__ import annotations

import math

from .batches import Batch

EPS = 1e-6


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def std(xs: list[float]) -> float:
    if len(xs) < 2:
        return 0.0
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def positions(batch: Batch, session: int) -> list[int]:
    """Where a session's sampled tokens are, in time order."""
    return [i for i, s in enumerate(batch.session) if s == session and batch.mask[i]]


def score(batch: Batch, session: int) -> float:
    return sum(batch.reward[i] for i in positions(batch, session))


def members(batch: Batch, group: int) -> list[int]:
    """Sessions of a group that have sampled tokens."""
    return [s for s, g in enumerate(batch.group) if g == group and positions(batch, s)]


def has_signal(batch: Batch, group: int) -> bool:
    scores = [score(batch, s) for s in members(batch, group)]
    return len(scores) > 1 and any(x != scores[0] for x in scores)


def whitened(batch: Batch, values: list[float]) -> list[float]:
    sampled = [values[i] for i in range(len(values)) if batch.mask[i]]
    if len(sampled) < 2 or all(x == sampled[0] for x in sampled):
        return [0.0] * len(values)
    return [
        (x - mean(sampled)) / (std(sampled) + EPS) if batch.mask[i] else 0.0 for i, x in enumerate(values)
    ]


def by_session(batch: Batch, value_of_session: dict[int, float]) -> list[float]:
    return [value_of_session.get(s, 0.0) if batch.mask[i] else 0.0 for i, s in enumerate(batch.session)]


def group_relative(batch: Batch, kind: str) -> list[float]:
    """grpo, dr_grpo and rloo."""
    result = {}
    for group in set(batch.group):
        if not has_signal(batch, group):
            continue
        for s in members(batch, group):
            scores = [score(batch, other) for other in members(batch, group)]
            others = [score(batch, other) for other in members(batch, group) if other != s]
            mine = score(batch, s)
            result[s] = {
                "grpo": (mine - mean(scores)) / (std(scores) + EPS),
                "dr_grpo": mine - mean(scores),
                "rloo": mine - mean(others),
            }[kind]
    return by_session(batch, result)


def returns(batch: Batch, gamma: float) -> list[float]:
    result = [0.0] * len(batch.session)
    for s in range(len(batch.group)):
        ahead = 0.0
        for i in reversed(positions(batch, s)):
            ahead = batch.reward[i] + gamma * ahead
            result[i] = ahead
    return result


def reinforce_pp_baseline(batch: Batch) -> list[float]:
    white = whitened(batch, group_relative(batch, "dr_grpo"))
    return [x if has_signal(batch, batch.group[batch.session[i]]) else 0.0 for i, x in enumerate(white)]


def remax(batch: Batch) -> list[float]:
    return [
        x - batch.baseline[batch.session[i]] if batch.mask[i] else 0.0
        for i, x in enumerate(returns(batch, 1.0))
    ]


def gae(batch: Batch, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages before whitening, and returns."""
    advantages, targets = [0.0] * len(batch.session), [0.0] * len(batch.session)
    for s in range(len(batch.group)):
        next_value, next_advantage = 0.0, 0.0
        for i in reversed(positions(batch, s)):
            delta = batch.reward[i] + gamma * next_value - batch.value[i]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = batch.value[i]
            advantages[i], targets[i] = next_advantage, next_advantage + next_value
    return advantages, targets


def advantages(batch: Batch, kind: str, gamma: float, lam: float, whiten: bool) -> list[float]:
    if kind in ("grpo", "dr_grpo", "rloo"):
        return group_relative(batch, kind)
    if kind == "reinforce_pp":
        return whitened(batch, returns(batch, gamma))
    if kind == "reinforce_pp_baseline":
        return reinforce_pp_baseline(batch)
    if kind == "remax":
        return remax(batch)
    plain, _ = gae(batch, gamma, lam)
    return whitened(batch, plain) if whiten else plain


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def log_ratios(batch: Batch, kind: str) -> list[float]:
    """What each token's ratio is the exponential of: its own, or its session's mean (gspo)."""
    result = [0.0] * len(batch.session)
    for s in range(len(batch.group)):
        where = positions(batch, s)
        for i in where:
            own = batch.logprob[i] - batch.old[i]
            whole = mean([batch.logprob[j] - batch.old[j] for j in where])
            result[i] = whole if kind == "gspo" else own
    return result


def policy(batch: Batch, kind: str, clip_low: float, clip_high: float) -> tuple[list[float], list[float]]:
    """Loss of each token, and its derivative by the token's logprob (stop-gradients kept)."""
    losses, slopes = [0.0] * len(batch.session), [0.0] * len(batch.session)
    for i, log_ratio in enumerate(log_ratios(batch, kind)):
        if not batch.mask[i]:
            continue
        a, logprob, r = batch.advantage[i], batch.logprob[i], math.exp(log_ratio)
        if kind == "reinforce":
            losses[i], slopes[i] = -a * logprob, -a
        elif kind == "cispo":
            weight = clip(r, 1 - clip_low, 1 + clip_high)
            losses[i], slopes[i] = -weight * a * logprob, -weight * a
        elif kind == "dppo":
            change = math.exp(logprob) - math.exp(batch.old[i])
            held = (a > 0 and change > clip_high) or (a < 0 and change < -clip_low)
            losses[i] = slopes[i] = 0.0 if held else -r * a
        else:
            unclipped, clipped = r * a, clip(r, 1 - clip_low, 1 + clip_high) * a
            losses[i], slopes[i] = -min(unclipped, clipped), -r * a if unclipped <= clipped else 0.0
    return losses, slopes


def aggregated(batch: Batch, kind: str, losses: list[float]) -> float:
    sessions = [positions(batch, s) for s in range(len(batch.group)) if positions(batch, s)]
    if not sessions:
        return 0.0
    if kind == "token_mean":
        return mean([losses[i] for where in sessions for i in where])
    if kind == "seq_mean_token_sum":
        return mean([sum(losses[i] for i in where) for where in sessions])
    return mean([mean([losses[i] for i in where]) for where in sessions])
