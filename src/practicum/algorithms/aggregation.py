"""How the losses of tokens become one number.

    token_mean            sum_t loss_t / T
    seq_mean_token_sum    sum_s sum_{t in s} loss_t / S
    seq_mean_token_mean   sum_s sum_{t in s} loss_t / (S T_s)

T is the number of sampled tokens, T_s that of session s, and S the number of sessions that have
any. token_mean is DAPO's (Yu et al. 2025, arXiv:2503.14476), seq_mean_token_mean is that of GRPO
(Shao et al. 2024, arXiv:2402.03300).

The counts are of a whole optimizer mini-batch, over all its micro-batches and ranks. So the weights
are made once for the mini-batch, and each part adds sum(weights_N * loss_N) over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from practicum.algorithms.segments import segment_count
from practicum.errors import PracticumError


def _token_mean(tokens_S: Tensor) -> Tensor:
    return tokens_S.sum().expand_as(tokens_S)


def _seq_mean_token_sum(tokens_S: Tensor) -> Tensor:
    return (tokens_S > 0).sum().expand_as(tokens_S)


def _seq_mean_token_mean(tokens_S: Tensor) -> Tensor:
    return (tokens_S > 0).sum() * tokens_S


# Each gives the divisor of the tokens of each session, from the number of its sampled tokens.
AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "token_mean": _token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "seq_mean_token_mean": _seq_mean_token_mean,
}


def token_weights(
    kind: str,
    mask_N: Tensor,
    session_N: Tensor,
    sessions: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights for which sum(weights_N * loss_N) is the aggregated loss; 0 at masked positions.

    `mask_N` and `session_N` are of the whole optimizer mini-batch, over micro-batches and ranks.
    """
    if kind not in AGGREGATIONS:
        known = ", ".join(AGGREGATIONS)
        raise PracticumError(f"Aggregation {kind!r} does not exist: use one of {known}.")
    tokens_S = segment_count(session_N[mask_N], sessions)
    weight_S = 1.0 / AGGREGATIONS[kind](tokens_S).clamp(min=1).to(dtype)
    return weight_S[session_N].masked_fill(~mask_N, 0.0)
