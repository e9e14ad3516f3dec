"""Ragged batches for property tests: Python lists, and the packed tensors made of them.

Sessions are interleaved; groups have unequal sizes down to one; tokens are masked anywhere, and
some sessions have no sampled token or no token at all. Tensors hold NaN at masked positions, so
that reading one of them shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from practicum.algorithms.advantages import AdvantageInputs
from practicum.algorithms.losses import PolicyInputs
from practicum.recipe.algorithm_traits import ON_DISTRIBUTIONS, ON_SAMPLED, ON_TOP_K

PAIRS: tuple[tuple[str, str], ...] = (
    *((name, signal) for name in ON_DISTRIBUTIONS for signal in ("top_k", "student_top_k", "shared", "full")),
    *((name, "top_k") for name in ON_TOP_K),
    *((name, signal) for name in ON_SAMPLED for signal in ("sampled", "shared")),
)
"""Each divergence with each signal that it can be computed from."""

law = settings(max_examples=60)

TOKEN_FIELDS = ("session", "mask", "reward", "value", "logprob", "old", "advantage")


@dataclass(frozen=True)
class Batch:
    """One entry per token, except `group` and `baseline`: one per session."""

    session: list[int]
    mask: list[bool]
    reward: list[float]
    value: list[float]
    logprob: list[float]
    old: list[float]
    advantage: list[float]
    group: list[int]
    baseline: list[float]

    def floats(self, name: str) -> Tensor:
        """A token field as float64, with NaN at masked positions."""
        values_N = torch.tensor(getattr(self, name), dtype=torch.float64)
        return values_N.masked_fill(~self.mask_N, torch.nan)

    @property
    def mask_N(self) -> Tensor:
        return torch.tensor(self.mask, dtype=torch.bool)

    @property
    def session_N(self) -> Tensor:
        return torch.tensor(self.session, dtype=torch.int64)

    def advantage_inputs(self, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> AdvantageInputs:
        return AdvantageInputs(
            token_rewards_N=self.floats("reward"),
            mask_N=self.mask_N,
            session_N=self.session_N,
            group_S=torch.tensor(self.group, dtype=torch.int64),
            baseline_S=torch.tensor(self.baseline, dtype=torch.float64),
            values_N=self.floats("value"),
            gamma=gamma,
            lam=lam,
            whiten=whiten,
        )

    def policy_inputs(self, clip_low: float = 0.2, clip_high: float = 0.28) -> PolicyInputs:
        return PolicyInputs(
            logprobs_N=self.floats("logprob").requires_grad_(),
            old_logprobs_N=self.floats("old"),
            advantages_N=self.floats("advantage"),
            mask_N=self.mask_N,
            session_N=self.session_N,
            clip_low=clip_low,
            clip_high=clip_high,
        )

    def reordered(self, order: list[int]) -> Batch:
        """The tokens at `order`, which must keep each session's own in time order."""
        return replace(self, **{f: [getattr(self, f)[i] for i in order] for f in TOKEN_FIELDS})


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any batch with a session; rewards are per token, or outcomes that often tie."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    group = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    lengths = [draw(st.integers(0, 6)) for _ in group]
    session = draw(st.permutations([s for s, n in enumerate(lengths) for _ in range(n)]))
    # The shape is hypothesis' to shrink; the numbers come of a seed, which is much faster to draw.
    rng = Random(draw(st.integers(0, 2**32)))
    mute = {s for s in range(len(group)) if rng.random() < 0.1}
    mask = [s not in mute and rng.random() < 0.75 for s in session]

    def numbers(low: float, high: float, count: int) -> list[float]:
        return [0.0 if rng.random() < 0.1 else rng.uniform(low, high) for _ in range(count)]

    n = len(session)
    old = numbers(-3.0, 0.0, n)
    batch = Batch(
        session=list(session),
        mask=mask,
        reward=numbers(-2.0, 2.0, n),
        value=numbers(-2.0, 2.0, n),
        logprob=[o + d for o, d in zip(old, numbers(-1.5, 1.5, n), strict=True)],
        old=old,
        advantage=numbers(-2.0, 2.0, n),
        group=list(group),
        baseline=numbers(-1.0, 1.0, len(group)),
    )
    if rng.random() < 0.7:
        batch = replace(batch, reward=outcome_rewards(batch, rng))
    return batch


def outcome_rewards(batch: Batch, rng: Random) -> list[float]:
    """One of two rewards at each session's last sampled token, 0 elsewhere."""
    last = {s: i for i, s in enumerate(batch.session) if batch.mask[i]}
    outcome = {i: rng.choice([0.1, 1.0]) for i in last.values()}
    return [outcome.get(i, 0.0) for i in range(len(batch.session))]


@st.composite
def with_more_masked_tokens(draw: st.DrawFn, batch: Batch) -> tuple[Batch, list[int]]:
    """The batch with masked tokens and tokenless sessions added, and where the old tokens went."""
    extra = draw(st.integers(1, 3))
    groups = max(batch.group, default=0)
    group = batch.group + [draw(st.integers(0, groups + 1)) for _ in range(extra)]
    tokens: list[int | None] = list(range(len(batch.session)))
    for _ in range(draw(st.integers(1, 6))):
        tokens.insert(draw(st.integers(0, len(tokens))), None)
    more = replace(
        batch,
        group=group,
        baseline=batch.baseline + [0.0] * extra,
        session=[draw(st.integers(0, len(group) - 1)) if i is None else batch.session[i] for i in tokens],
        mask=[False if i is None else batch.mask[i] for i in tokens],
        **{f: [0.0 if i is None else getattr(batch, f)[i] for i in tokens] for f in TOKEN_FIELDS[2:]},
    )
    return more, [at for at, i in enumerate(tokens) if i is not None]


@st.composite
def with_sessions_permuted(draw: st.DrawFn, batch: Batch) -> tuple[Batch, list[int]]:
    """Sessions and groups renumbered and interleaved anew, and where the tokens came from."""
    queues = {s: [i for i, t in enumerate(batch.session) if t == s] for s in range(len(batch.group))}
    order = [queues[s].pop(0) for s in draw(st.permutations(batch.session))]
    new_name = draw(st.permutations(range(len(batch.group))))
    new_group = draw(st.permutations(range(max(batch.group, default=-1) + 1)))
    old_of = sorted(range(len(batch.group)), key=lambda s: new_name[s])
    moved = batch.reordered(order)
    return replace(
        moved,
        session=[new_name[s] for s in moved.session],
        group=[new_group[batch.group[s]] for s in old_of],
        baseline=[batch.baseline[s] for s in old_of],
    ), order
