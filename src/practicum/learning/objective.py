"""The student's loss of each sampled token, and what is reported of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from practicum.algorithms.kl import token_kl
from practicum.algorithms.policy_losses.registry import POLICY_LOSSES
from practicum.algorithms.policy_losses.types import PolicyInputs
from practicum.learning.batch import UpdateBatch, need_column, token_column
from practicum.learning.logprobs import TokenLogprobs
from practicum.learning.metrics import TokenMeans
from practicum.recipe.schema import Algorithm

Columns = Mapping[str, Tensor]


def needed_columns(batch: UpdateBatch, algorithm: Algorithm) -> dict[str, Tensor]:
    """The batch's token columns [M] that this loss reads."""
    columns: dict[str, Tensor | None] = {"plain_logprobs": token_column(batch, "plain_logprobs")}
    if algorithm.loss != "supervised":
        columns["old_logprobs"] = token_column(batch, "old_logprobs")
        columns["advantages"] = need_column(batch, "advantages", f"loss {algorithm.loss}")
    if algorithm.kl.place == "loss":
        columns["ref_logprobs"] = need_column(batch, "ref_logprobs", "algorithm.kl.place: loss")
    return {name: column for name, column in columns.items() if column is not None}


def surely_zero_gradient(algorithm: Algorithm) -> bool:
    """Whether a session without advantage has no gradient: nothing but the policy loss pulls at it."""
    pulls = algorithm.entropy > 0 or algorithm.kl.place == "loss"
    return algorithm.loss != "supervised" and not pulls


def token_losses(
    found: TokenLogprobs,
    columns: Columns,
    session_M: Tensor,
    algorithm: Algorithm,
    means: TokenMeans,
) -> tuple[Tensor, Tensor]:
    """Loss [M] of sampled tokens, and the policy's part of it; statistics go into `means`.

    `columns` and `session_M` are of these tokens; a session's tokens must all be here (gspo).
    """
    logprobs_M, entropy_M = found.logprobs_M, found.entropy_M
    assert entropy_M is not None
    means.add("entropy", entropy_M)
    if algorithm.loss == "supervised":
        policy_M = -logprobs_M
    else:
        policy_M = _policy_loss(logprobs_M, columns, session_M, algorithm, means)
    loss_M = policy_M
    if algorithm.entropy > 0:
        loss_M = loss_M - algorithm.entropy * entropy_M
    if algorithm.kl.place == "loss":
        every_M = torch.ones_like(logprobs_M, dtype=torch.bool)
        kl = algorithm.kl
        terms = token_kl(kl.estimator, logprobs_M, columns["ref_logprobs"], every_M, kl.clamp)
        loss_M = loss_M + kl.coefficient * terms.kl_N
        means.add("kl", terms.kl_N)
        if kl.clamp is not None:
            means.add("kl_clamped", terms.clamped_N)
    if "plain_logprobs" in columns:
        assert found.plain_M is not None
        _count_gap(found.plain_M - columns["plain_logprobs"], means)
    return loss_M, policy_M


def _policy_loss(
    logprobs_M: Tensor, columns: Columns, session_M: Tensor, algorithm: Algorithm, means: TokenMeans
) -> Tensor:
    terms = POLICY_LOSSES[algorithm.loss](
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
    return terms.loss_N


def _count_gap(difference_M: Tensor, means: TokenMeans) -> None:
    means.add("gap_mean", difference_M.abs())
    means.add_max("gap_max", difference_M.abs())
    means.add("gap_k3", torch.expm1(difference_M) - difference_M)
