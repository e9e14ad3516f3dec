"""Whether the longest rows that a recipe allows can be learnt from, found out before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from practicum.dataplane.ragged import Ragged
from practicum.devices import memory_of, peak_memory, reset_peak_memory
from practicum.learning.learner import Learner
from practicum.learning.logprobs import token_logprobs
from practicum.learning.packing import Packed, RowSpans
from practicum.models.offloaded_weights import return_memory


def probe_memory(learner: Learner, prompt: int, response: int) -> str | None:
    """Forward and backward pass of a micro-batch of rows with this many tokens, beside the optimizer's state.

    It leaves no trace but smaller micro-batches, if these are too large for the device. A row that is too
    long is a PracticumError. Says how much memory it took, where torch knows. All ranks together.
    """
    trunk, device = learner.trunk, learner.trunk.device
    reset_peak_memory(device)
    state = _empty_state(learner)

    def loss(packed: Packed) -> Tensor:
        with trunk.precision():
            hidden_M = trunk.hidden(packed)
            found = token_logprobs(learner.model, hidden_M, packed.target_M, temperature=1.0, entropy=True)
        return found.logprobs_M.mean()

    def attempt() -> int:
        learner.stepper.optimizer.zero_grad(set_to_none=True)
        rows = _rows(learner, prompt, response)
        with trunk.training():
            trunk.each(trunk.microbatches(rows), loss)
        return len(rows.lengths)

    try:
        rows = trunk.halving(attempt)
        peak, total = peak_memory(device), memory_of(device)
    finally:
        del state
        learner.stepper.optimizer.zero_grad(set_to_none=True)
        return_memory(device)
    if peak is None or total is None:
        return None
    what = f"{rows} rows of {prompt + response:,} tokens, the longest that the recipe allows"
    return f"memory was tried with {what}: {peak / 2**30:.1f} of {total / 2**30:.1f} GiB at most"


def _rows(learner: Learner, prompt: int, response: int) -> RowSpans:
    """As many rows as fill a micro-batch; no prompt is shared."""
    count = max(1, learner.trunk.token_budget // (prompt + response))
    vocab = learner.model.config.get_text_config().vocab_size
    ids = [(torch.arange(prompt + response) + i) % vocab for i in range(count)]
    return RowSpans(
        Ragged.from_rows([row[:prompt] for row in ids]), Ragged.from_rows([row[prompt:] for row in ids])
    )


def _empty_state(learner: Learner) -> list[Tensor]:
    """Memory as the optimizer will take at its first step: moments, and master weights of 16-bit ones."""
    if learner.stepper.optimizer.state:
        return []
    return [
        torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for p in learner.stepper.parameters
        for _ in range(2 if p.itemsize >= 4 else 3)
    ]
