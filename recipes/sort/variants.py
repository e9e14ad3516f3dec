"""Published variants that are functions of one's own rather than keys of the recipe."""

import torch

from practicum.parts import (
    AdvantageInputs,
    AdvantageResult,
    BatchRef,
    Columns,
    PolicyInputs,
    PolicyTerms,
    Ragged,
    RewardSample,
    StepInfo,
    advantage,
    group_scores,
    policy_loss,
    policy_terms,
    session_scores,
    stage,
    to_tokens,
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


@advantage(compares_groups=True, reads=[])
def maxrl(inputs: AdvantageInputs) -> AdvantageResult:
    """Divide by the mean of the group: A = (score - mean) / mean, for rewards of 0 and 1.

    On average this is the gradient of a truncated log of the pass rate, so hard prompts count more. Tajwar et
    al. 2026, "Maximum likelihood reinforcement learning", arXiv:2602.02710.
    """
    scores = group_scores(inputs)
    score_S, _ = session_scores(inputs)
    mean_S = score_S - scores.centred_S
    advantages_S = torch.where(mean_S > 0, scores.centred_S / mean_S, torch.zeros_like(mean_S))
    return AdvantageResult(to_tokens(advantages_S, inputs), stats=scores.stats)


WEIGHTS = {"checker": 1.0, "in_place": 0.5}
"""Weights of the normalised rewards."""


def in_place(sample: RewardSample) -> float:
    """Return the share of the characters that stand where the answer has them."""
    answer = str(sample.answer)
    pairs = zip(sample.response_text, answer, strict=False)
    return sum(a == b for a, b in pairs) / max(len(sample.response_text), len(answer))


@advantage(compares_groups=True, reads=[])
def gdpo(inputs: AdvantageInputs) -> AdvantageResult:
    """Normalise each reward within its group, add them by weight, and normalise the sums over the batch.

    The sum of rewards hides which of them differ. Liu et al. 2026, "GDPO: Group reward-decoupled
    normalization policy optimization for multi-reward RL optimization", arXiv:2601.05242.
    """
    _, has_tokens_S = session_scores(inputs)
    sum_S = torch.zeros(len(inputs.group_S))
    for name, part_S in inputs.parts_S.items():
        for group in inputs.group_S.unique():
            mine_S = has_tokens_S & (inputs.group_S == group) & ~part_S.isnan()
            own = part_S[mine_S]
            if len(own) > 1 and own.min() != own.max():
                sum_S[mine_S] += WEIGHTS.get(name, 1.0) * (own - own.mean()) / (own.std() + 1e-6)
    live = sum_S[has_tokens_S]
    if len(live) > 1 and live.min() != live.max():
        sum_S = (sum_S - live.mean()) / (live.std() + 1e-6)
    return AdvantageResult(to_tokens(sum_S, inputs))


@stage(after="pad", reads=["response_ids", "response_mask"], writes=["token_weight"], about="tool output too")
def tool_output(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Learn tool output by cross-entropy, a tenth of a sampled token's weight; no special tokens at all."""
    ids, mask = columns.ragged("response_ids"), columns.ragged("response_mask")
    weight_N = torch.full((len(ids.values),), 0.1).masked_fill(mask.values, 1.0)
    weight_N[torch.isin(ids.values, torch.tensor(rank.tokenizer.all_special_ids))] = 0.0
    return {"token_weight": Ragged.packed(weight_N, ids.lengths)}


FRACTION = 0.2
"""Share of the sampled tokens that is learnt from."""


def largest(rank, values: Ragged, mask: Ragged) -> Ragged:
    """Return 1 for the sampled tokens with the largest values of the batch, on whichever rank, else 0."""
    own = values.values[mask.values]
    everywhere = own if rank.parallel is None else torch.cat(rank.parallel.gather(own))
    least = everywhere.quantile(1 - FRACTION) if len(everywhere) else 0.0
    return Ragged.packed((mask.values & (values.values >= least)).float(), mask.lengths)


@stage(after="pad", reads=["prompt_ids", "response_ids", "response_mask"], writes=["token_weight"])
def top_entropy(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Learn from the fifth of the tokens at which the student is least sure (arXiv:2506.01939)."""
    prompts, responses = columns.ragged("prompt_ids"), columns.ragged("response_ids")
    scorer, at = rank.student.learner.scorer, rank.recipe.rollout.temperature
    entropies = scorer.entropies(prompts, responses, temperature=at)
    return {"token_weight": largest(rank, entropies, columns.ragged("response_mask"))}
