"""vLLM's sampler with two things that training needs: logprobs at temperature 1 too, and scores at others.

In the engine's process only: importing this imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler  # pyright: ignore[reportMissingImports]


class PlainLogprobSampler(Sampler):
    """Requests with 1 logprob get two: of the token as it was sampled, and at temperature 1, uncut."""

    temperature: float
    vocab: int
    """Of the prompts that are scored now: all share them."""
    _sampling: bool

    @classmethod
    def take_over(cls, sampler: Sampler, vocab: int) -> PlainLogprobSampler:
        """Make vLLM's own sampler one of these."""
        if type(sampler) is not Sampler:
            raise TypeError(f"vLLM samples with a {type(sampler).__name__}, which is not known")
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        sampler.temperature, sampler.vocab, sampler._sampling = 1.0, vocab, False
        return sampler

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
        # First: sampling changes the logits in place.
        plain = logits.log_softmax(-1, dtype=torch.float32)
        self._sampling = True
        try:
            output = super().forward(logits, sampling_metadata, *args, **more)
        finally:
            self._sampling = False
        found = output.logprobs_tensors
        if found is not None and found.logprobs.shape[1] == 2:
            taken = output.sampled_token_ids[:, :1].long()
            found.logprob_token_ids[:, 1:] = taken
            found.logprobs[:, 1:] = plain.gather(1, taken)
        return output

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of what was processed for sampling, or of a prompt's tokens."""
        if not self._sampling:
            logits = logits.float() / self.temperature
            logits[..., self.vocab :] = -torch.inf
        return logits.log_softmax(-1, dtype=torch.float32)
