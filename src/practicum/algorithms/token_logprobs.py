"""From logits to logprobs: the one way that learner, reference, engine and teachers take.

Equal logits so give equal bits, and a teacher that is the student gives exactly no loss. It is torch's
log-softmax: it works on each row by itself, in the same order whatever rows are beside it and however many
threads there are, and it subtracts the greatest logit first, so that large logits cost no digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_LOGITS, GPU_BLOCK_LOGITS = 2**18, 2**24
"""Logits of the rows worked on at once: few, so that temporaries stay in a processor's cache and the heap
stays small; more on a GPU, where each call has a price.
"""


def scaled_logits(logits_CV: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in float32 or, if they are, in float64."""
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def log_distribution(scaled_CV: Tensor) -> Tensor:
    """Logprobs [C, V] of the whole vocabulary."""
    return scaled_CV.log_softmax(-1)


@torch.no_grad()
def logprobs_at(scaled_CV: Tensor, ids_CK: Tensor) -> Tensor:
    """Logprobs [C, K] of these tokens, without gradient, a few rows at a time."""
    logprobs_CK = scaled_CV.new_empty(ids_CK.shape)
    for rows in row_blocks(scaled_CV):
        logprobs_CK[rows] = log_distribution(scaled_CV[rows]).gather(1, ids_CK[rows])
    return logprobs_CK


def row_blocks(logits_CV: Tensor) -> list[slice]:
    rows, vocab = logits_CV.shape
    logits = BLOCK_LOGITS if logits_CV.device.type == "cpu" else GPU_BLOCK_LOGITS
    size = max(1, logits // vocab)
    return [slice(i, i + size) for i in range(0, rows, size)]
