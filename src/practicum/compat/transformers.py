"""Interfaces of transformers that are not public, or may move. Tested with transformers 5.19 and 5.23.

Attention and experts are registered functions, which transformers calls in each layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import transformers
from torch import Tensor, nn

from practicum.errors import EngineError

TESTED = "5.19 to 5.23"

try:
    from transformers import AttentionInterface
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.utils.import_utils import is_vision_available
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    raise EngineError(
        f"transformers {transformers.__version__} lacks an interface that practicum uses: install "
        f"transformers {TESTED} ({error})"
    ) from error

__all__ = [
    "GradientCheckpointingLayer",
    "disable_progress_bar",
    "grouped_mm_experts_forward",
    "is_vision_available",
    "sdpa_attention_forward",
]

IMPLEMENTATION = "practicum"
"""The name of practicum's attention and experts among transformers' implementations."""


def register_attention(function: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Register an attention function for `use_attention`. Masks are those of SDPA."""
    AttentionInterface.register(IMPLEMENTATION, function)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def register_experts(function: Callable[..., Tensor]) -> None:
    """Register the experts that models take after `set_experts_implementation(IMPLEMENTATION)`."""
    ExpertsInterface.register(IMPLEMENTATION, function)


def use_attention(model: Any) -> None:
    """Route the attention over text through the registered function. A vision tower keeps its own."""
    model.set_attn_implementation({"": IMPLEMENTATION, "text_config": IMPLEMENTATION})


def uses_attention(model: Any) -> bool:
    """Return True if `use_attention` was called for the model."""
    return model.config._attn_implementation == IMPLEMENTATION


def eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the eager attention function of a module's model family."""
    return sys.modules[type(module).__module__].eager_attention_forward


def stored_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Return weights by the names and in the shapes of the model's files. Those of experts differ."""
    return revert_weight_conversion(model, dict(weights)).items()


def checkpoint_layers(model: Any) -> None:
    """Have the backward pass recompute each layer. transformers 5.19 has the older name alone."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def pil_image_processor(**options: Any) -> Any:
    """Return an image processor of Qwen2-VL that needs no torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**options)
