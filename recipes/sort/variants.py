"""Published variants that are functions of one's own rather than keys of the recipe."""

import torch

from practicum.parts import PolicyInputs, PolicyTerms, policy_loss, policy_terms, token_log_ratios

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
