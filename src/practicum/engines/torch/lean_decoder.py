"""A lean forward for decoders like Llama and Qwen: the model's own weights, a third of the calls.

With small models and few rows, decoding is bound by the number of calls, not by arithmetic. The engine
compares this forward with the model's own before it uses it, and goes without where it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from practicum.models.adapter_rows import RowsLayer
from practicum.models.attention import Layout, LogitScalings, head_logits, padded_layout
from practicum.models.batch_invariance import mlp_width, pad_rows, padded_tokens
from practicum.models.linears import PackedWeights, combine, is_linear
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
        return module.is_product and is_linear(module.base_layer)
    return is_linear(module) or is_plain_adapted(module)


class LeanDecoder:
    """Last hidden states of packed tokens, and logits; for use without gradients."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._base = model, cast(Any, model.base_model)
        self._width = mlp_width(model)
        self._eps = torch.tensor(model.config.rms_norm_eps, device=model.device)
        self.packed = PackedWeights()
        head = model.get_output_embeddings()
        self._head = head if head is not None and is_linear(head) and _is_plain(head) else None

    def __call__(self, ids_N: Tensor, positions_N: Tensor, layout: Layout, *, pack: bool = False) -> Tensor:
        """As `models.attention.packed_forward`, to the bit; `pack` makes packed weights."""
        base, eps, tokens = self._base, self._eps, len(ids_N)
        rows = padded_tokens(tokens, self._width)
        ids_N, positions_N = pad_rows(ids_N, rows), pad_rows(positions_N, rows)
        layout = padded_layout(layout, tokens, rows)
        hidden_N = base.embed_tokens(ids_N)
        cos, sin = (x.squeeze(0).unsqueeze(1) for x in base.rotary_emb(hidden_N, positions_N.unsqueeze(0)))
        half = cos.shape[-1] // 2
        # Rotary embedding negates the half that it swaps to the front: the sign is put into the sine.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        multiply = partial(self._multiply, pack)
        for i, layer in enumerate(base.layers):
            normed = _norm(hidden_N, layer.input_layernorm, eps)
            attended = _attention(i, layer.self_attn, normed, (cos, sin, eps), layout, multiply)
            hidden_N = multiply(attended, layer.self_attn.o_proj, "add", hidden_N)
            normed = _norm(hidden_N, layer.post_attention_layernorm, eps)
            gate = silu(multiply(normed, layer.mlp.gate_proj), inplace=True)
            gate = multiply(normed, layer.mlp.up_proj, "mul", gate)
            hidden_N = multiply(gate, layer.mlp.down_proj, "add", hidden_N)
        return _norm(hidden_N, base.norm, eps)[:tokens]

    def logits(self, hidden_N: Tensor, *, pack: bool = False) -> Tensor:
        """As `models.attention.head_logits`, to the bit."""
        if self._head is None:
            return head_logits(self._model, hidden_N)
        logits_NV = self._multiply(pack, pad_rows(hidden_N), self._head)[: len(hidden_N)]
        return LogitScalings.of(self._model).apply(logits_NV)

    def _multiply(
        self,
        pack: bool,
        x: Tensor,
        module: Any,
        then: Literal["", "add", "mul"] = "",
        other: Tensor | None = None,
    ) -> Tensor:
        """Rows times a layer's weight; then added to others or multiplied by them (these may change)."""
        if is_linear(module):
            return self.packed.multiply(x, module.weight, module.bias, make=pack, then=then, other=other)
        if isinstance(module, RowsLayer):
            rows = module(x)
        else:
            rows = adapted_linear(x, module, partial(self.packed.multiply, make=pack))
        return rows if other is None else combine(rows, then, other)


def _attention(
    index: int,
    module: Any,
    hidden_N: Tensor,
    constants: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    multiply: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    width = module.head_dim
    cos, sin, eps = constants
    query, key, value = (
        multiply(hidden_N, part).unflatten(-1, (-1, width))
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
