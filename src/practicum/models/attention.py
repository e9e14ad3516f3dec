"""The seam through which practicum lays out attention in any transformers model.

transformers calls a registered function in each attention layer. Ours hands queries, keys and values to the
`Layout` given to the forward call: the learner's attends within packed sequences that share prompts, the
engine's writes and reads its KV memory. So linear layers see packed tokens without padding. A forward call
without a layout gets plain SDPA attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from practicum.errors import EngineError
from practicum.models.batch_invariance import mlp_width, pad_rows, padded_tokens
from practicum.models.images import Images
from practicum.models.linears import product
from practicum.models.packed_attention import uncompiled
from practicum.models.padded_attention import AttentionRule
from practicum.models.vision import embed, is_vision

IMPLEMENTATION = "practicum"
_UNSUPPORTED = ("position_bias", "sinks")


class Layout(Protocol):
    """How the packed tokens of one forward call attend to each other and to memory."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [N, heads, D], key and value [N, kv heads, D] of packed tokens → output [N, heads, D]."""
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
    if layout is None:
        own = _own_attention(module) if softcap is not None or sinks is not None else sdpa_attention_forward
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    used = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
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


def _own_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The family's attention as its authors wrote it, for what SDPA leaves out without a word."""
    written = sys.modules[type(module).__module__].eager_attention_forward

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if mask is None:  # SDPA would be told to be causal
            shape = query.shape[2], key.shape[2]
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
        if mask.dtype == torch.bool:
            zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
            mask = zeros.masked_fill(~mask, torch.finfo(query.dtype).min)
        return written(module, query, key, value, mask, **kwargs)

    return attention


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def prepare_attention(model: PreTrainedModel) -> None:
    """Route the model's attention over text through this seam; a vision tower keeps its own."""
    model.set_attn_implementation({"": IMPLEMENTATION, "text_config": IMPLEMENTATION})


@dataclass(frozen=True, slots=True)
class _PaddedLayout:
    """A layout of the first `tokens` rows; those after them are padding, of which nothing is read."""

    layout: Layout
    tokens: int
    rows: int

    @uncompiled
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        query, key, value = (x[: self.tokens] for x in (query, key, value))
        return pad_rows(self.layout.attend(layer, query, key, value, rule), self.rows)


def padded_layout(layout: Layout, tokens: int, rows: int) -> Layout:
    """The same layout, for tokens that `pad_rows` has padded to this many rows."""
    return layout if tokens == rows else _PaddedLayout(layout, tokens, rows)


def run_model(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], positions_N: Tensor, layout: Layout
) -> Tensor:
    """Last hidden states [N, hidden] of ids or embeddings [1, N, ...], by the names that the model takes."""
    # Positions of one axis become [1, N], of several [D, 1, N].
    positions = positions_N.unsqueeze(0) if positions_N.dim() == 1 else positions_N.t().unsqueeze(1)
    # A mask that is already 4-D is passed through unread, so no [N, N] mask is ever built.
    unread = torch.empty(1, 1, 1, 1, device=positions_N.device)
    out = model.base_model(
        **inputs,
        position_ids=positions,
        attention_mask=unread,
        use_cache=False,
        layout=layout,
    )
    return out.last_hidden_state.squeeze(0)


def packed_forward(
    model: PreTrainedModel,
    ids_N: Tensor,
    positions_N: Tensor,
    layout: Layout,
    images: Sequence[Images] = (),
    picture_N: Tensor | None = None,
    run: Callable[..., Tensor] = run_model,
) -> Tensor:
    """Last hidden states [N, hidden] of packed tokens under a layout; positions are [N] or [N, D].

    Pictures come in the order of their tokens: those of `picture_N`, or unset the first image tokens.
    `run` is `run_model`, or the same compiled.
    """
    tokens = len(ids_N)
    rows = padded_tokens(tokens, mlp_width(model))
    if is_vision(model.config):
        embedded_N = embed(model, ids_N, positions_N, images, picture_N)
        inputs = {"inputs_embeds": pad_rows(embedded_N, rows).unsqueeze(0)}
    else:
        inputs = {"input_ids": pad_rows(ids_N, rows).unsqueeze(0)}
    hidden_N = run(model, inputs, pad_rows(positions_N, rows), padded_layout(layout, tokens, rows))
    return hidden_N[:tokens]


@dataclass(frozen=True, slots=True)
class LogitScalings:
    """What some families do to the logits after the output head."""

    logit_scale: float | None = None
    logits_scaling: float | None = None
    final_logit_softcapping: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitScalings:
        """Those of the model's language part, which in a vision model has a config of its own."""
        config = model.config.get_text_config()
        return cls(*(getattr(config, field.name, None) for field in fields(cls)))

    def apply(self, logits: Tensor) -> Tensor:
        """The model's logits, from those that its head gives."""
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        if self.logits_scaling is not None:
            logits = logits / self.logits_scaling
        if (cap := self.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def head_logits(model: PreTrainedModel, hidden_N: Tensor) -> Tensor:
    """Logits [N, V] of last hidden states, with the scalings that some families put after the head."""
    return LogitScalings.of(model).apply(_head(model)(pad_rows(hidden_N))[: len(hidden_N)])


def _head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    if head is None:
        raise EngineError(f"{type(model).__name__} has no output head; a causal language model is needed")
    return head


@dataclass(frozen=True, slots=True)
class OutputHead:
    """A model's output head on its own: with last hidden states it gives the whole distribution."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    scalings: LogitScalings = field(default_factory=LogitScalings)

    @classmethod
    def of(cls, model: PreTrainedModel, *, copy: bool = True) -> OutputHead:
        """A copy of the model's head, which later changes of the model do not reach; or the head itself."""
        head: Any = _head(model)
        parts = (None if x is None else x.detach() for x in (head.weight, getattr(head, "bias", None)))
        weight, bias = (x.clone() if copy and x is not None else x for x in parts)
        assert weight is not None
        return cls(weight, bias, LogitScalings.of(model))

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Logits [M, V] as the model itself computes them (see `head_logits`)."""
        padded_MH = pad_rows(hidden_MH.to(self.weight.dtype))
        logits_MV = product(padded_MH, self.weight, self.bias)
        return self.scalings.apply(logits_MV[: len(hidden_MH)])
