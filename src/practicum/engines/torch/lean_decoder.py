"""A lean forward for decoders like Llama and Qwen: the model's own weights, a third of the calls.

With small models and few rows, decoding is bound by the number of calls, not by arithmetic. The engine
compares this forward with the model's own before it uses it, and goes without where it does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from practicum.models.adapter_rows import RowsLayer
from practicum.models.attention import Layout, padded_layout
from practicum.models.batch_invariance import mlp_width, pad_rows, padded_tokens
from practicum.models.lora_product import adapted_linear, is_plain_adapted
from practicum.models.padded_attention import AttentionRule

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}


def lean_decoder(model: PreTrainedModel) -> LeanDecoder | None:
    """A lean forward of this model, if it is of a family and number type that it knows."""
    config: Any = model.config
    known = (
        config.model_type in _FAMILIES
        and config.hidden_act == "silu"
        # The families' norms compute in float32 whatever the weights are; only then are both the same.
        and model.dtype == torch.float32
        and not getattr(config, "sliding_window", None)
        and config.rope_parameters.get("partial_rotary_factor") in (None, 1.0)
    )
    return LeanDecoder(model) if known and all(map(_is_plain, _linears(model))) else None


def _linears(model: PreTrainedModel) -> Iterator[nn.Module]:
    base: Any = model.base_model
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _is_plain(module: nn.Module) -> bool:
    """A matrix, with a LoRA adapter or without: no quantization or hook that only its own call would run."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(module, RowsLayer):
        return module.is_product and type(module.base_layer) is nn.Linear
    return type(module) is nn.Linear or is_plain_adapted(module)


class LeanDecoder:
    """Last hidden states of packed tokens; for use without gradients."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: Any = model.base_model
        self._width = mlp_width(model)
        self._eps = torch.tensor(model.config.rms_norm_eps, device=model.device)

    def __call__(self, ids_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
        """As `models.attention.packed_forward`, to the bit."""
        base, eps, tokens = self._base, self._eps, len(ids_N)
        rows = padded_tokens(tokens, self._width)
        ids_N, positions_N = pad_rows(ids_N, rows), pad_rows(positions_N, rows)
        layout = padded_layout(layout, tokens, rows)
        hidden_N = base.embed_tokens(ids_N)
        cos, sin = (x.squeeze(0).unsqueeze(1) for x in base.rotary_emb(hidden_N, positions_N.unsqueeze(0)))
        half = cos.shape[-1] // 2
        # Rotary embedding negates the half that it swaps to the front: the sign is put into the sine.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for i, layer in enumerate(base.layers):
            normed = _norm(hidden_N, layer.input_layernorm, eps)
            attended = _attention(i, layer.self_attn, normed, (cos, sin, eps), layout)
            hidden_N.add_(_linear(attended, layer.self_attn.o_proj))
            normed = _norm(hidden_N, layer.post_attention_layernorm, eps)
            gate = silu(_linear(normed, layer.mlp.gate_proj), inplace=True)
            hidden_N.add_(_linear(gate.mul_(_linear(normed, layer.mlp.up_proj)), layer.mlp.down_proj))
        return _norm(hidden_N, base.norm, eps)[:tokens]


def _attention(
    index: int, module: Any, hidden_N: Tensor, constants: tuple[Tensor, Tensor, Tensor], layout: Layout
) -> Tensor:
    width = module.head_dim
    cos, sin, eps = constants
    query, key, value = (
        _linear(hidden_N, part).unflatten(-1, (-1, width))
        for part in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = _norm(query, module.q_norm, eps), _norm(key, module.k_norm, eps)
    heads = query.shape[1]
    both = torch.cat((query, key), 1)
    both = (both * cos).add_(both.roll(width // 2, -1).mul_(sin))
    return layout.attend(
        index, both[:, :heads], both[:, heads:], value, AttentionRule(module.scaling)
    ).flatten(1)


def _norm(x: Tensor, module: Any, eps: Tensor) -> Tensor:
    """RMSNorm in fewer passes than torch's own takes on a CPU, the same bits as `models.norms`."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(module.weight)


def _linear(x: Tensor, module: Any) -> Tensor:
    if type(module) is nn.Linear:
        return linear(x, module.weight, module.bias)
    return module(x) if isinstance(module, RowsLayer) else adapted_linear(x, module)
