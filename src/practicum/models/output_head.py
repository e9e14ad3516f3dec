"""A model's output head on its own: with last hidden states it gives the whole distribution."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.errors import EngineError
from practicum.models.attention import LogitScalings


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Weights of an output head and the scalings that some families put after it."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    scalings: LogitScalings = field(default_factory=LogitScalings)

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputHead:
        """A copy of the model's head, which later changes of the model do not reach."""
        head = model.get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(model).__name__} has no output head; a causal language model is needed")
        bias = getattr(head, "bias", None)
        return cls(
            head.weight.detach().clone(),  # pyright: ignore[reportCallIssue]  (a module's attribute)
            None if bias is None else bias.detach().clone(),
            LogitScalings.of(model),
        )

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Logits [M, V] as the model itself computes them (see `models.attention.head_logits`)."""
        hidden_MH = hidden_MH.to(self.weight.dtype)
        return self.scalings.apply(torch.nn.functional.linear(hidden_MH, self.weight, self.bias))
