"""How the losses of tokens become one number.

    token_mean            sum_t loss_t / T
    seq_mean_token_sum    sum_s sum_{t in s} loss_t / S
    seq_mean_token_mean   sum_s sum_{t in s} loss_t / (S T_s)

T is the number of sampled tokens, T_s that of session s, and S the number of sessions that have
any. token_mean is DAPO's (Yu et al. 2025, arXiv:2503.14476), seq_mean_token_mean is that of GRPO
(Shao et al. 2024, arXiv:2402.03300).

The counts are of a whole optimizer mini-batch, over all its micro-batches and ranks. So the weights
are made once for the mini-batch, and each part adds sum(weights_N * loss_N) over its own tokens.

A mini-batch m may hold only some of a session's tokens, T_sm of the T_s that the whole batch has. It
then counts as the fraction T_sm / T_s of a session:

    S_m = sum_s T_sm / T_s
    seq_mean_token_sum    sum_s sum_{t in s, m} loss_t / S_m
    seq_mean_token_mean   sum_s sum_{t in s, m} loss_t / (S_m T_s)

So sum_m S_m loss_m = S loss for any cut into mini-batches: a session weighs the same whether it is
cut or not. For whole sessions S_m is the number of sessions.

With token weights w_t, w_t loss_t is summed and each count of tokens is the sum of their weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from practicum.algorithms.segments import segment_count
from practicum.recipe.algorithm_traits import AGGREGATION_NAMES
from practicum.recipe.own_parts import find_part


def token_mean(tokens_S: Tensor, whole_S: Tensor) -> Tensor:
    return tokens_S.sum().expand_as(tokens_S)


def seq_mean_token_sum(tokens_S: Tensor, whole_S: Tensor) -> Tensor:
    return session_count(tokens_S, whole_S).expand_as(tokens_S)


def seq_mean_token_mean(tokens_S: Tensor, whole_S: Tensor) -> Tensor:
    return session_count(tokens_S, whole_S) * whole_S


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: globals()[name] for name in AGGREGATION_NAMES
}
"""Each returns the divisor of the tokens of each session, from the number of its sampled tokens in the
mini-batch and in the whole batch."""


def session_count(tokens_S: Tensor, whole_S: Tensor) -> Tensor:
    """The number of sessions in a mini-batch, a float64 scalar. A part of a session is a fraction."""
    # Sessions without tokens are left out first: how many there are must not change the sum's rounding.
    present_S = tokens_S > 0
    return (tokens_S[present_S].double() / whole_S[present_S]).sum()


def token_weights(
    kind: str,
    mask_N: Tensor,
    session_N: Tensor,
    sessions: int,
    dtype: torch.dtype = torch.float32,
    *,
    whole_S: Tensor | None = None,
    tokens_S: Tensor | None = None,
) -> Tensor:
    """Weights for which sum(weights_N * loss_N) is the aggregated loss, 0 at masked positions.

    `mask_N` and `session_N` are of the whole optimizer mini-batch, or of a rank's part of it. Then `tokens_S`
    are the sampled tokens of each session in the mini-batch, over all ranks.
    `whole_S` are the sampled tokens of each session in the whole batch. None means those of the mini-batch.
    """
    if tokens_S is None:
        tokens_S = segment_count(session_N[mask_N], sessions)
    divisor = find_part("aggregation", kind, AGGREGATIONS)
    divisor_S = divisor(tokens_S, tokens_S if whole_S is None else whole_S)
    weight_S = (1.0 / divisor_S.to(dtype)).masked_fill(divisor_S == 0, 0.0)  # all its tokens weigh nothing
    return weight_S[session_N].masked_fill(~mask_N, 0.0)
