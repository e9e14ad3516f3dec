"""Sample tokens from logits: temperature, truncation, and inverse-CDF sampling with one uniform per token.

The uniform number is splitmix64's output for (key, position), where a generation's key is a hash of its
`Counter`. So a sample depends only on its identity, not on batch, slot or order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from practicum.algorithms.token_logprobs import log_distribution, scaled_logits
from practicum.engines.protocol import Counter, Sampling
from practicum.errors import EngineError

_FIRST_LOOK = 1024
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


class Draw(NamedTuple):
    """The settings of Sampling that shape the distribution. Rows with equal settings are sampled together."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    report: int = 0

    @classmethod
    def of(cls, sampling: Sampling) -> Draw:
        if sampling.greedy:
            return cls(greedy=True, report=sampling.report)
        cuts = sampling.top_k, sampling.top_p, sampling.min_p
        return cls(False, sampling.temperature, *cuts, sampling.report)

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Sampled(NamedTuple):
    """Tokens, and their logprobs under the sampling distribution and the model's distribution. `top_BK` are
    the most likely tokens, as many as are reported."""

    tokens_B: Tensor
    logprobs_B: Tensor
    plain_B: Tensor
    top_BK: Tensor


def sample(logits_SV: Tensor, draw: Draw, uniform_B: Tensor, row_B: Tensor) -> Sampled:
    """Sample a token for each uniform number from row `row_B` of the logits, in ascending order of rows, with
    temperature, top-k, top-p and min-p in this order.

    Greedy takes the most likely token, with its logprob at temperature 1. Without truncation, logprobs equal
    those of learner and teachers for the same logits.
    """
    plain_SV = log_distribution(scaled_logits(logits_SV, 1.0))
    top_BK = plain_SV.topk(min(draw.report, plain_SV.shape[1]), dim=-1).indices[row_B]
    if draw.greedy:
        tokens_B = logits_SV.argmax(-1)[row_B]
        _check_finite(plain_SV.amax(-1))
        logprobs_B = plain_SV[row_B, tokens_B]
        return Sampled(tokens_B, logprobs_B, logprobs_B, top_BK)
    tempered_SV = plain_SV
    if draw.temperature != 1.0:
        tempered_SV = log_distribution(scaled_logits(logits_SV, draw.temperature))
    weights_SV = tempered_SV.exp()
    tokens_B, total_B = inverse_cdf(cut(weights_SV, draw) if draw.cuts else weights_SV, uniform_B, row_B)
    _check_finite(total_B)
    logprobs_B = tempered_SV[row_B, tokens_B]
    if draw.cuts:
        logprobs_B = logprobs_B - total_B.log()
    return Sampled(tokens_B, logprobs_B, plain_SV[row_B, tokens_B], top_BK)


def _check_finite(sum_B: Tensor) -> None:
    if not bool(sum_B.isfinite().all()):
        raise EngineError(
            "the model's logits are not finite: its weights are corrupt, or its dtype overflows"
        )


def cut(weights_BV: Tensor, draw: Draw) -> Tensor:
    """Set to 0 the probabilities that top-k, top-p and min-p exclude.

    top-k keeps exactly k tokens, top-p the smallest set of most likely tokens with this share of the
    remaining mass, and min-p tokens with at least this share of the largest probability.
    """
    if draw.top_k > 0 or draw.top_p < 1.0:
        weights_BV = _cut_ranked(weights_BV, draw.top_k, draw.top_p, _FIRST_LOOK)
    if draw.min_p > 0.0:
        weights_BV = weights_BV * (weights_BV >= draw.min_p * weights_BV.amax(-1, keepdim=True))
    return weights_BV


def _cut_ranked(weights_BV: Tensor, top_k: int, top_p: float, width: int) -> Tensor:
    vocab = weights_BV.shape[-1]
    width = min(top_k or width, vocab)
    best_BK, ids_BK = weights_BV.topk(width, dim=-1)
    if top_p < 1.0:
        mass_BK = best_BK.cumsum(-1, dtype=torch.float64)
        total_B1 = mass_BK[:, -1:] if top_k else weights_BV.sum(-1, True, dtype=torch.float64)
        wanted_B1 = top_p * total_B1
        if not top_k and width < vocab and bool((mass_BK[:, -1:] < wanted_B1).any()):
            return _cut_ranked(weights_BV, top_k, top_p, vocab)
        best_BK = best_BK * (mass_BK - best_BK < wanted_B1)
    return torch.zeros_like(weights_BV).scatter_(-1, ids_BK, best_BK)


def inverse_cdf(weights_SV: Tensor, uniform_B: Tensor, row_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at share `uniform` of the running float64 sum of row `row_B`, and the row's total."""
    sums_SV = weights_SV.cumsum(-1, dtype=torch.float64)
    total_B = sums_SV[row_B, -1]
    # Numbers of one row lie beside each other, so that its sums are not repeated.
    row_B = row_B.contiguous()
    place_B = torch.arange(len(row_B), device=row_B.device) - torch.searchsorted(row_B, row_B)
    wanted_SK = sums_SV.new_zeros(len(sums_SV), int(place_B.max()) + 1)
    wanted_SK[row_B, place_B] = uniform_B * total_B
    return torch.searchsorted(sums_SV, wanted_SK, right=True)[row_B, place_B], total_B


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def stream_key(counter: Counter) -> int:
    """Return the counter's hash, as a signed 64-bit number."""
    key = 0
    for part in (counter.seed, counter.prompt, counter.session, counter.turn):
        x = (key + part + _GAMMA) & _MASK
        x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
        x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
        key = x ^ (x >> 31)
    return _signed(key)


def skip_ahead(key: int, count: int) -> int:
    """Return the key whose number at position 0 is this key's at position `count`."""
    return _signed((key + count * _GAMMA) & _MASK)


def uniforms(key_B: Tensor, position_B: Tensor) -> Tensor:
    """Return float64 [B] in [0, 1) for each (key, position), which are int64. Uses 52 bits, so that the
    product of the largest value with a total never rounds up to the total."""
    x = key_B + (position_B + 1) * _signed(_GAMMA)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ _shift_right(x, shift)) * _signed(multiplier)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 12).to(torch.float64) * 2.0**-52


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
