"""The student's loss of each sampled token, and what is reported of it.

loss = policy loss (or supervised) + distill.weight × divergence from the teachers - entropy + KL penalty
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.algorithms.kl import k3, token_kl
from practicum.algorithms.policy_losses.registry import POLICY_LOSSES
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms
from practicum.learning.distill_loss import DistillResult, DistillSettings
from practicum.learning.logprobs import TokenLogprobs
from practicum.learning.update_batch import UpdateBatch, need_column, token_column
from practicum.learning.update_metrics import TokenMeans
from practicum.recipe.own_parts import find_part
from practicum.recipe.schema.algorithm_sections import Algorithm

Columns = Mapping[str, Tensor]
_CLIPS = {
    "clipped_low": "clip_low",
    "clipped_high": "clip_high",
    "dual_clipped": "dual_clip",
    "log_ratio_clamped": "log_ratio_clamp",
}
"""Statistics of policy losses that say where a rule of the recipe held a token."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update minimises."""

    algorithm: Algorithm
    teaching: DistillSettings | None = None

    @property
    def supervised(self) -> bool:
        """Whether the rows are demonstrations."""
        return self.algorithm.loss == "supervised"

    @property
    def has_policy(self) -> bool:
        """Whether there is a policy loss, and so advantages."""
        return not self.supervised and not (self.teaching is not None and self.teaching.alone)

    @property
    def uses_logprobs(self) -> bool:
        """Whether the gradient flows through the sampled tokens' logprobs at the sampling temperature."""
        teaching = self.teaching
        sampled = teaching is not None and teaching.by_loss and teaching.distill.signal == "sampled"
        return self.supervised or self.has_policy or sampled or self.algorithm.kl.place == "loss"

    def columns(self, batch: UpdateBatch) -> dict[str, Tensor]:
        """The batch's token columns [M, ...] that this loss reads."""
        compared = ("rollout_logprobs", "plain_logprobs")
        columns: dict[str, Tensor | None] = {name: token_column(batch, name) for name in compared}
        if self.has_policy:
            columns["old_logprobs"] = token_column(batch, "old_logprobs")
            columns["advantages"] = need_column(batch, "advantages", f"loss {self.algorithm.loss}")
        if self.algorithm.kl.place == "loss":
            columns["ref_logprobs"] = need_column(batch, "ref_logprobs", "algorithm.kl.place: loss")
        if self.teaching is not None:
            columns |= self.teaching.columns(batch.teachers, batch.response_ids.lengths)
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a session without advantage surely has no gradient: nothing else pulls at it."""
        taught = self.teaching is not None and self.teaching.by_loss
        pulls = self.algorithm.entropy > 0 or self.algorithm.kl.place == "loss" or taught
        return self.has_policy and not pulls


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Loss of each sampled token [M], and the parts of it that are reported.

    `numbers` and `rules`, where each held, are what a record tells of single tokens.
    """

    loss_M: Tensor
    policy_M: Tensor | None
    taught: DistillResult | None
    numbers: dict[str, Tensor | None]
    rules: dict[str, Tensor]


def token_losses(
    found: TokenLogprobs,
    columns: Columns,
    session_M: Tensor,
    objective: Objective,
    means: TokenMeans,
) -> TokenLosses:
    """Losses of sampled tokens; statistics go into `means`.

    `columns` and `session_M` are of these tokens; a session's tokens must all be here (gspo).
    """
    algorithm, teaching = objective.algorithm, objective.teaching
    logprobs_M, entropy_M = found.logprobs_M, found.entropy_M
    assert entropy_M is not None
    means.add("entropy", entropy_M)
    policy_M = taught = None
    numbers: dict[str, Tensor | None] = {"learner_logprobs": logprobs_M, "entropy": entropy_M}
    rules: dict[str, Tensor] = {}
    if objective.supervised:
        policy_M = -logprobs_M
    elif objective.has_policy:
        policy = _policy_loss(logprobs_M, columns, session_M, algorithm, means)
        policy_M = policy.loss_N
        numbers |= {"ratio": policy.stats_N.get("ratio"), "weight": policy.weight_N}
        rules |= {rule: policy.stats_N[name] for name, rule in _CLIPS.items() if name in policy.stats_N}
    loss_M = torch.zeros_like(logprobs_M) if policy_M is None else policy_M
    if teaching is not None:
        taught = teaching.token_losses(found, columns, means)
        if taught.loss_M is not None:
            loss_M = loss_M + teaching.distill.weight * taught.loss_M
        numbers |= {"teacher_kl": taught.kl_M, "teacher_overlap": taught.overlap_M}
        numbers |= {"teacher_entropy_gap": taught.entropy_gap_M, "teacher_loss": taught.loss_M}
        if taught.clamped_M is not None:
            rules["distill_clamp"] = taught.clamped_M
    if algorithm.entropy > 0:
        loss_M = loss_M - algorithm.entropy * entropy_M
    if algorithm.kl.place == "loss":
        every_M = torch.ones_like(logprobs_M, dtype=torch.bool)
        kl = algorithm.kl
        terms = token_kl(kl.estimator, logprobs_M, columns["ref_logprobs"], every_M, kl.clamp)
        loss_M = loss_M + kl.coefficient * terms.kl_N
        means.add("kl", terms.kl_N)
        numbers["kl"] = terms.kl_N
        if kl.clamp is not None:
            means.add("kl_clamped", terms.clamped_N)
            rules["kl_clamp"] = terms.clamped_N
    if "rollout_logprobs" in columns:
        _count_gap(logprobs_M - columns["rollout_logprobs"], means)
    elif "plain_logprobs" in columns:
        assert found.plain_M is not None
        _count_gap(found.plain_M - columns["plain_logprobs"], means)
    return TokenLosses(loss_M, policy_M, taught, numbers, rules)


def _policy_loss(
    logprobs_M: Tensor, columns: Columns, session_M: Tensor, algorithm: Algorithm, means: TokenMeans
) -> PolicyTerms:
    policy_loss = find_part("policy_loss", algorithm.loss, POLICY_LOSSES)
    terms = policy_loss(
        PolicyInputs(
            logprobs_N=logprobs_M,
            old_logprobs_N=columns.get("old_logprobs", logprobs_M.detach()),
            advantages_N=columns["advantages"],
            mask_N=torch.ones_like(logprobs_M, dtype=torch.bool),
            session_N=session_M,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            log_ratio_clamp=algorithm.log_ratio_clamp,
        )
    )
    off = {"dual_clipped": algorithm.dual_clip, "log_ratio_clamped": algorithm.log_ratio_clamp}
    for name, value_M in terms.stats_N.items():
        if off.get(name, 0) is not None:
            means.add(name, value_M)
    return terms


def _count_gap(difference_M: Tensor, means: TokenMeans) -> None:
    difference_M = difference_M.detach().double()  # k3 of a wildly wrong token has no size in single
    means.add("gap_mean", difference_M.abs())
    means.add_max("gap_max", difference_M.abs())
    means.add("gap_k3", k3(-difference_M))
    means.add_weights("sample_size", difference_M)
