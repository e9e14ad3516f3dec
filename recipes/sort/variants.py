"""Published variants that are functions of one's own rather than keys of the recipe."""

import torch

from practicum.parts import (
    BatchRef,
    Columns,
    PolicyInputs,
    PolicyTerms,
    Ragged,
    StepInfo,
    policy_loss,
    policy_terms,
    stage,
    token_log_ratios,
)

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
"""Steepness of the gate for tokens whose advantage is above 0, and for others: these fade sooner."""


@policy_loss(reads=[])
def sapo(inputs: PolicyInputs) -> PolicyTerms:
    """A soft gate in place of the clip: loss = -(4 / tau) sigmoid(tau (ratio - 1)) A.

    At ratio 1 its gradient is that of the plain ratio; farther away it fades, and is never 0. Gao et al.
    2025, "Soft adaptive policy optimization", arXiv:2511.20347.
    """
    log_ratio_N, advantages_N = token_log_ratios(inputs), inputs.advantages_N.masked_fill(~inputs.mask_N, 0.0)
    tau_N = torch.full_like(advantages_N, TAU_NEGATIVE).masked_fill(advantages_N > 0, TAU_POSITIVE)
    gate_N = torch.sigmoid(tau_N * torch.expm1(log_ratio_N))
    weight_N = 4 * gate_N * (1 - gate_N) * log_ratio_N.exp()
    return policy_terms(inputs, -4 / tau_N * gate_N * advantages_N, log_ratio_N, weight_N=weight_N)


@stage(after="pad", reads=["response_ids", "response_mask"], writes=["token_weight"], about="tool output too")
def tool_output(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Learn tool output by cross-entropy, a tenth of a sampled token's weight; no special tokens at all."""
    ids, mask = columns.ragged("response_ids"), columns.ragged("response_mask")
    weight_N = torch.full((len(ids.values),), 0.1).masked_fill(mask.values, 1.0)
    weight_N[torch.isin(ids.values, torch.tensor(rank.tokenizer.all_special_ids))] = 0.0
    return {"token_weight": Ragged.packed(weight_N, ids.lengths)}
