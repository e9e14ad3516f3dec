"""A model's output head on its own: with last hidden states it gives the whole distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.errors import EngineError


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Weights of an output head and the scalings that some families put behind it."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    logit_scale: float | None = None
    logits_scaling: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputHead:
        """A copy of the model's head, which later changes of the model do not reach."""
        head = model.get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(model).__name__} has no output head; a causal language model is needed")
        bias = getattr(head, "bias", None)
        config = model.config
        return cls(
            head.weight.detach().clone(),  # pyright: ignore[reportCallIssue]  (a module's attribute)
            None if bias is None else bias.detach().clone(),
            getattr(config, "logit_scale", None),
            getattr(config, "logits_scaling", None),
            getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Logits [M, V] as the model itself computes them (see `models.attention.head_logits`)."""
        logits = torch.nn.functional.linear(hidden_MH.to(self.weight.dtype), self.weight, self.bias)
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        if self.logits_scaling is not None:
            logits = logits / self.logits_scaling
        if self.final_logit_softcapping is not None:
            logits = torch.tanh(logits / self.final_logit_softcapping) * self.final_logit_softcapping
        return logits
