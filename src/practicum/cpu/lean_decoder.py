"""A lean forward for decoders like Llama and Qwen: the model's own weights, a third of the calls.

With small models and few rows, decoding is bound by the number of calls, not by arithmetic. The engine
compares this forward with the model's own before it uses it, and goes without where it does not fit. To
support another family, add it to _FAMILIES if its layers have the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from practicum.compat.torch import has_hooks
from practicum.cpu import switch
from practicum.cpu.adapted_linears import adapted_linear, is_plain_adapted
from practicum.cpu.adapter_rows import RowsLayer
from practicum.cpu.batch_invariance import mlp_width, pad_rows, padded_tokens
from practicum.cpu.linears import PackedWeights, combine, is_linear

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
_LINEARS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of a layer: its number, query [N, heads, D], key and value [N, kv heads, D], and the scale."""


def lean_decoder(model: Any) -> LeanDecoder | None:
    """Return a lean forward of this model, if it is of a family and dtype that it knows."""
    config, head = model.config, model.get_output_embeddings()
    known = (
        switch.ENABLED
        and config.model_type in _FAMILIES
        and config.hidden_act == "silu"
        # The families' norms compute in float32 whatever the weights are; only then are both the same.
        and model.dtype == torch.float32
        and not getattr(config, "sliding_window", None)
        and config.rope_parameters.get("partial_rotary_factor") in (None, 1.0)
    )
    if not known or head is None or not is_linear(head):
        return None
    linears = [layer.get_submodule(name) for layer in model.base_model.layers for name in _LINEARS]
    return LeanDecoder(model) if all(map(_is_plain, [*linears, head])) else None


def _is_plain(module: nn.Module) -> bool:
    """Return True for a matrix, with a LoRA adapter or without, that has no quantization or hook."""
    if has_hooks(module):
        return False
    if isinstance(module, RowsLayer):
        return module.is_product and is_linear(module.base_layer)
    return is_linear(module) or is_plain_adapted(module)


class LeanDecoder:
    """Last hidden states of packed tokens, and products with the head. Use it without gradients."""

    def __init__(self, model: Any) -> None:
        self._base, self._head = cast(Any, model.base_model), model.get_output_embeddings()
        self._width, self.layers = mlp_width(model), len(self._base.layers)
        self._eps = torch.tensor(model.config.rms_norm_eps, device=model.device)
        self.packed = PackedWeights()

    def __call__(
        self,
        ids_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        *,
        pack: bool = False,
        wanted_M: Tensor | None = None,
    ) -> Tensor:
        """Return what `packed_forward` does, to the bit, of `wanted_M` alone; `pack` makes packed weights."""
        base, eps, tokens = self._base, self._eps, len(ids_N)
        rows = padded_tokens(tokens, self._width)
        hidden_N = base.embed_tokens(pad_rows(ids_N, rows))
        positions_N = pad_rows(positions_N, rows).unsqueeze(0)
        cos, sin = (x.squeeze(0).unsqueeze(1) for x in base.rotary_emb(hidden_N, positions_N))
        half = cos.shape[-1] // 2
        # Rotary embedding negates the half that it swaps to the front: the sign is put into the sine.
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        multiply = partial(self._multiply, pack)
        for i, layer in enumerate(base.layers):
            module, normed = layer.self_attn, _norm(hidden_N, layer.input_layernorm, eps)
            query, key, value = (
                multiply(normed, part).unflatten(-1, (-1, module.head_dim))
                for part in (module.q_proj, module.k_proj, module.v_proj)
            )
            if hasattr(module, "q_norm"):
                query, key = _norm(query, module.q_norm, eps), _norm(key, module.k_norm, eps)
            heads, both = query.shape[1], torch.cat((query, key), 1)
            both = (both * cos).add_(both.roll(half, -1).mul_(sin))
            if tokens < rows:
                both, value = both[:tokens], value[:tokens]
            attended = attend(i, both[:, :heads], both[:, heads:], value, module.scaling)
            if wanted_M is not None and layer is base.layers[-1]:
                tokens, rows = len(wanted_M), padded_tokens(len(wanted_M), self._width)
                attended, hidden_N = attended[wanted_M], pad_rows(hidden_N[wanted_M], rows)
            hidden_N = multiply(pad_rows(attended, rows).flatten(1), module.o_proj, "add", hidden_N)
            normed = _norm(hidden_N, layer.post_attention_layernorm, eps)
            gate = silu(multiply(normed, layer.mlp.gate_proj), inplace=True)
            gate = multiply(normed, layer.mlp.up_proj, "mul", gate)
            hidden_N = multiply(gate, layer.mlp.down_proj, "add", hidden_N)
        return _norm(hidden_N, base.norm, eps)[:tokens]

    def head(self, hidden_N: Tensor, *, pack: bool = False) -> Tensor:
        """Return the head's output [N, V], without scalings."""
        return self._multiply(pack, pad_rows(hidden_N), self._head)[: len(hidden_N)]

    def _multiply(
        self,
        pack: bool,
        x: Tensor,
        module: Any,
        then: Literal["", "add", "mul"] = "",
        other: Tensor | None = None,
    ) -> Tensor:
        """Multiply rows by a layer's weight, then add them to others or multiply both (these may change)."""
        if is_linear(module):
            return self.packed.multiply(x, module.weight, module.bias, make=pack, then=then, other=other)
        if isinstance(module, RowsLayer):
            rows = module(x)
        else:
            rows = adapted_linear(x, module, partial(self.packed.multiply, make=pack))
        return rows if other is None else combine(rows, then, other)


def _norm(x: Tensor, module: Any, eps: Tensor) -> Tensor:
    """Compute RMSNorm in fewer passes than torch's own takes on a CPU, with the bits of `cpu.norms`."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(module.weight)
