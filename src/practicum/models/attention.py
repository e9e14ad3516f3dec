"""Replace attention in any transformers model by practicum's packed attention.

transformers calls a registered function in each attention layer. Ours passes queries, keys and values to the
`Layout` given to the forward call: the learner's attends within packed sequences that share prompts, the
engine's writes and reads its KV memory. So linear layers see packed tokens without padding. A forward call
without a layout gets plain SDPA attention. Layers that carry a state instead of attending get their rows from
the same layout: `state_layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.compat.transformers import eager_attention, register_attention, sdpa_attention_forward
from practicum.cpu.batch_invariance import mlp_width, pad_rows, padded_tokens
from practicum.cpu.linears import product
from practicum.errors import EngineError
from practicum.models.packed_attention import uncompiled
from practicum.models.padded_attention import AttentionRule
from practicum.models.state_layers import StateLayer, seam_of
from practicum.models.vision import Images, embed, is_vision


class Layout(Protocol):
    """How the packed tokens of one forward call attend to each other and to memory."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [N, heads, D], key and value [N, kv heads, D] of packed tokens → output [N, heads, D]."""
        ...

    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        """Run a state layer on packed tokens [N, H] → output [N, H]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if layout is None:  # some families do not pass it on
        layout = seam_of(module).layout
    if layout is None:
        mask, attend = attention_mask, sdpa_attention_forward
        if softcap is not None or sinks is not None:  # which SDPA silently ignores
            mask, attend = _eager_mask(mask, query, key), eager_attention(module)
        return attend(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    used = [name for name in ("position_bias", "sinks") if kwargs.get(name) is not None]
    if used:
        raise EngineError(
            f"{type(module).__name__} uses {', '.join(used)} in its attention, which packed attention does "
            "not know"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rule = AttentionRule(scale, kwargs.get("sliding_window") or None, softcap, sinks)
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return layout.attend(layer, query, key, value, rule).unsqueeze(0), None


def _eager_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return the additive mask for a mask in SDPA's format (None: causal)."""
    if mask is None:
        shape = query.shape[2], key.shape[2]
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill(~mask, torch.finfo(query.dtype).min)


register_attention(_attention)


@dataclass(frozen=True, slots=True)
class _PaddedLayout:
    """A layout of the first `tokens` rows. Those after them are padding, which nothing reads."""

    layout: Layout
    tokens: int
    rows: int

    @uncompiled
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        query, key, value = (x[: self.tokens] for x in (query, key, value))
        return pad_rows(self.layout.attend(layer, query, key, value, rule), self.rows)

    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        return pad_rows(self.layout.mix(layer, hidden_NH[: self.tokens]), self.rows)


@contextmanager
def laid_out(model: PreTrainedModel, layout: Layout, tokens: int) -> Iterator[Layout]:
    """Inside the context, the model's layers compute packed tokens with this layout, followed by padding.
    With recomputed activations, the backward pass must be inside too."""
    rows, seam = padded_tokens(tokens, mlp_width(model)), seam_of(model)
    seam.layout = layout if tokens == rows else _PaddedLayout(layout, tokens, rows)
    try:
        yield seam.layout
    finally:
        seam.layout = None


@contextmanager
def computing_only(mlp: nn.Module | None, token_M: Tensor, width: int) -> Iterator[None]:
    """Inside the context, this MLP computes these of the packed tokens alone, and returns 0 for the others.
    For the last layer's, whose output for other tokens nothing reads. None changes nothing."""
    if mlp is None:
        yield
        return
    token_M = token_M.unique()
    rows, tokens = padded_tokens(len(token_M), width), 0

    def select(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        nonlocal tokens
        tokens = inputs[0].shape[1]
        return (pad_rows(inputs[0][0, token_M], rows).unsqueeze(0),)

    def place(_: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
        zeros = out.new_zeros(1, tokens, out.shape[2])
        return zeros.index_copy(1, token_M, out[:, : len(token_M)])

    with mlp.register_forward_pre_hook(select), mlp.register_forward_hook(place):
        yield


def packed_forward(
    model: PreTrainedModel,
    ids_N: Tensor,
    positions_N: Tensor,
    layout: Layout,
    images: Sequence[Images] = (),
    picture_N: Tensor | None = None,
) -> Tensor:
    """Return the last hidden states [N, hidden] of packed tokens. Positions are [N] or [N, D]. Images come in
    the order of their tokens: those of `picture_N`, or unset the first image tokens."""
    tokens = len(ids_N)
    rows = padded_tokens(tokens, mlp_width(model))
    if is_vision(model.config):
        embedded_N = embed(model, ids_N, positions_N, images, picture_N)
        inputs = {"inputs_embeds": pad_rows(embedded_N, rows).unsqueeze(0)}
    else:
        inputs = {"input_ids": pad_rows(ids_N, rows).unsqueeze(0)}
    positions_N = pad_rows(positions_N, rows)
    # Positions of one axis become [1, N], of several [D, 1, N].
    positions = positions_N.unsqueeze(0) if positions_N.dim() == 1 else positions_N.t().unsqueeze(1)
    with laid_out(model, layout, tokens) as padded_layout:
        out = model.base_model(
            **inputs,
            position_ids=positions,
            # A mask that is already 4-D is passed through unread, so no [N, N] mask is ever built.
            attention_mask=torch.empty(1, 1, 1, 1, device=positions_N.device),
            use_cache=False,
            layout=padded_layout,
        )
    return out.last_hidden_state[0, :tokens]


@dataclass(frozen=True, slots=True)
class LogitScalings:
    """Scalings of the logits after the output head, in some families."""

    logit_scale: float | None = None
    logits_scaling: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitScalings:
        config = model.config.get_text_config()
        return cls(*(getattr(config, field.name, None) for field in fields(cls)))

    def apply(self, logits: Tensor) -> Tensor:
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        if self.logits_scaling is not None:
            logits = logits / self.logits_scaling
        if (cap := self.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def head_logits(model: PreTrainedModel, hidden_N: Tensor) -> Tensor:
    """Return logits [N, V] of last hidden states."""
    head = _head(model)
    # The hidden states of some bfloat16 models are float32.
    padded_N = pad_rows(hidden_N.to(head.weight.dtype))
    return LogitScalings.of(model).apply(head(padded_N)[: len(hidden_N)])


def _head(model: PreTrainedModel) -> Any:
    head = model.get_output_embeddings()
    if head is None:
        raise EngineError(f"{type(model).__name__} has no output head; a causal language model is needed")
    return head


@dataclass(frozen=True, slots=True)
class OutputHead:
    """A model's output head: from last hidden states it computes the whole distribution."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    scalings: LogitScalings = field(default_factory=LogitScalings)

    @classmethod
    def of(cls, model: PreTrainedModel, *, copy: bool = True) -> OutputHead:
        """Return the model's head, or a copy that later changes of the model do not affect."""
        head = _head(model)
        parts = (None if x is None else x.detach() for x in (head.weight, getattr(head, "bias", None)))
        weight, bias = (x.clone() if copy and x is not None else x for x in parts)
        assert weight is not None
        return cls(weight, bias, LogitScalings.of(model))

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Return the model's logits [M, V] (see `head_logits`)."""
        padded_MH = pad_rows(hidden_MH.to(self.weight.dtype))
        logits_MV = product(padded_MH, self.weight, self.bias)
        return self.scalings.apply(logits_MV[: len(hidden_MH)])
