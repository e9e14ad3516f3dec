"""Layers that carry a state along the sequence: gated delta rule, KDA, Mamba and short convolutions.

The family's own module computes. In a packed forward call it gets rows of one sequence each, from the call's
`Layout`, with the state that each row continues from, so no state passes from one row to another. Without a
layout, and for layers that attend, nothing is changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from practicum.cpu.adapter_rows import AdapterRows, RowPart

if TYPE_CHECKING:
    from practicum.models.attention import Layout
    from practicum.models.packed_attention import Ints, Segments

_SEAM = "practicum_state"
_CACHES = ("cache_params", "past_key_values", "past_key_value", "layer_past", "cache", "state")
"""Names that layers have for what they remember of earlier tokens."""

STATE_LAYERS = ("continues", "steps")
"""What `_source_says` of layers that carry a state."""
_FEW_TOKENS = 64
"""Padding that is never worth one more call."""

States = Mapping[str, Tensor]
"""The states of a layer by name, each with a row for each sequence."""


@dataclass(eq=False, slots=True)
class Seam:
    """State shared by a model's recurrent layers: the layout of the current forward pass's tokens."""

    layout: Layout | None = None
    states: int = 0
    """How many layers carry a state."""
    adapters: AdapterRows | None = None


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer as layouts call it."""

    module: nn.Module
    number: int
    """Its place among the model's state layers."""
    continues: bool
    """It takes several tokens after a state; otherwise only one."""

    def run(self, rows_BTH: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        """Return the output of rows that continue from states, and the states after them. Given states may be
        overwritten."""
        taken, own_forward = _RowStates(states or {}), type(self.module).forward
        adapters = getattr(self.module, _SEAM)[0].adapters
        parts = [] if adapters is None else adapters.parts
        # All rows of a call have the same adapter: see `score_batch`.
        parts = [RowPart(parts[0].adapter, 0, rows_BTH.shape[0] * rows_BTH.shape[1])] if parts else []
        with nullcontext() if adapters is None else adapters.use(parts):
            out = own_forward(
                self.module, hidden_states=rows_BTH, **{str(_cache_name(type(self.module))): taken}
            )
        return out, taken.states()


@dataclass(eq=False, slots=True)
class _RowStates:
    """The cache that a family's layer takes: of rows and one layer. Gradients flow through the states."""

    given: States
    layers: Any = field(init=False)

    def __post_init__(self) -> None:
        parts: dict[str, dict[int, Tensor]] = {"conv": {}, "recurrent": {}}
        for name, state in self.given.items():
            kind, number = name.split()
            parts[kind][int(number)] = state
        held = SimpleNamespace(
            conv_states=parts["conv"], recurrent_states=parts["recurrent"], record_past=False
        )
        self.layers = _Everywhere(held)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.given)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1 if self.given else 0

    # From here to is_recording_past: asked for by transformers 5.23, not by 5.19.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layers[layer_idx].conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layers[layer_idx].recurrent_states.get(state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution. Return those that it needs."""
        held = self.layers[layer_idx].conv_states
        size = new.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if state_idx in held:
            new = torch.cat([held[state_idx], new], -1)
        elif new.shape[-1] < size:
            new = nn.functional.pad(new, (size - new.shape[-1], 0))
        held[state_idx] = new[..., -size:]
        return new

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.layers[layer_idx].recurrent_states[state_idx] = new
        return new

    def states(self) -> States:
        held = self.layers[0]
        kinds = (("conv", held.conv_states), ("recurrent", held.recurrent_states))
        return {f"{kind} {i}": state for kind, parts in kinds for i, state in parts.items()}


class _Everywhere:
    """A list that has one item at every place."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __getitem__(self, place: int) -> Any:
        return self._item


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Replace the module's own forward. It can be pickled by its name."""
    seam: Seam
    seam, number = getattr(self, _SEAM)
    if seam.layout is None:
        return type(self).forward(self, *args, **kwargs)
    hidden_1NH = args[0] if args else kwargs["hidden_states"]
    layer = StateLayer(self, number, _source_says(type(self)) == "continues")
    return seam.layout.mix(layer, hidden_1NH[0]).unsqueeze(0)


def add_seam(model: nn.Module) -> None:
    """Let layers that remember know of the layout of a forward call, and state layers compute by it."""
    seam = Seam()
    for module in model.modules():
        says = _source_says(type(module))
        if says:
            setattr(module, _SEAM, (seam, seam.states))
        if says in STATE_LAYERS:
            module.forward = MethodType(forward, module)
            seam.states += 1


def seam_of(model: nn.Module) -> Seam:
    """Return the state that the model's layers share, from the model or one of its layers."""
    return next((getattr(module, _SEAM)[0] for module in model.modules() if hasattr(module, _SEAM)), Seam())


KNOWN_LAYERS = (
    "softmax attention by transformers' AttentionInterface with keys and values of one shape in all layers, "
    "or gated delta rules, KDA, Mamba and short convolutions with its Cache"
)
"""The layers that can be laid out."""


def unknown_layers(model: nn.Module) -> str:
    """Return the layers that remember earlier tokens in a way that practicum can't lay out, or empty if none.
    Types and shapes of layers alone decide, so that all commands refuse the same models."""
    if unknown := _layers_that(model, "unknown"):
        return f"layers {unknown}"
    if counting := _layers_that(model, "counts"):
        return f"layers {counting}, which count positions by themselves"
    attending: list[Any] = [m for m in model.modules() if _source_says(type(m)) == "attends"]
    if not attending and not state_layers(model):
        return "no layers that attend or carry a state in a known way"
    keyed = [m for m in attending if hasattr(getattr(m, "k_proj", None), "out_features")]
    widths = {(m.k_proj.out_features, m.head_dim) for m in keyed}
    if len(widths) > 1:
        heads = " and ".join(f"{width // size} × {size}" for width, size in sorted(widths))
        return f"layers {_layers_that(model, 'attends')}, whose keys differ in shape ({heads})"
    return ""


def state_layers(model: nn.Module) -> str:
    """Return the types of the layers that carry a state, or empty if none do."""
    return _layers_that(model, *STATE_LAYERS)


@torch.no_grad()
def count_memory(model: nn.Module, hidden: int) -> tuple[int, int]:
    """Return how many layers attend, and the bytes of a sequence's states, of a model without weights."""
    add_seam(model)
    says = [(module, _source_says(type(module))) for module in model.modules()]
    rows = torch.zeros(1, 2, hidden, dtype=next(model.parameters()).dtype, device="meta")
    states = [StateLayer(module, 0, True).run(rows)[1] for module, how in says if how in STATE_LAYERS]
    return sum(how == "attends" for _, how in says), sum(x.nbytes for each in states for x in each.values())


def _layers_that(model: nn.Module, *says: str) -> str:
    return ", ".join(sorted({type(m).__name__ for m in model.modules() if _source_says(type(m)) in says}))


def read_weights_of(model: nn.Module) -> set[str]:
    """Return the modules whose weights state layers read by themselves: an adapter around one would be left
    out, as Mamba's fused kernels do with the last projection."""
    layers = ((name, type(m)) for name, m in model.named_modules() if _source_says(type(m)) in STATE_LAYERS)
    read = ((name, re.findall(r"self\.(\w+)\.weight\b", inspect.getsource(kind))) for name, kind in layers)
    return {f"{name}.{part}" for name, parts in read for part in parts}


@cache
def _cache_name(kind: type[nn.Module]) -> str | None:
    """Return the parameter by which layers of a class get their cache, or None if they take none."""
    return next((name for name in inspect.signature(kind.forward).parameters if name in _CACHES), None)


@cache
def _source_says(kind: type[nn.Module]) -> str:
    """Return how layers of a class remember: attends, counts (attends, by its own count of positions),
    continues, steps or unknown, or empty if they do not."""
    from transformers import PreTrainedModel

    from practicum.compat.transformers import GradientCheckpointingLayer

    whole = issubclass(kind, PreTrainedModel | GradientCheckpointingLayer)
    if whole or not kind.__module__.startswith("transformers."):
        return ""
    if (cache := _cache_name(kind)) is None:  # a layer with a switch alone has its state in itself
        return "unknown" if "use_cache" in inspect.signature(kind.forward).parameters else ""
    source, forward_source = inspect.getsource(kind), inspect.getsource(kind.forward)
    attends = "ALL_ATTENTION_FUNCTIONS" in source
    if "update_conv_state(" not in source and "update_recurrent_state(" not in source:
        return "unknown" if not attends else "counts" if "arange(" in source else "attends"
    parameters = inspect.signature(kind.forward).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if attends or needed - {"self", "hidden_states", cache} or re.search(r"return \w+, ", forward_source):
        return "unknown"  # `StateLayer.run` passes hidden states alone, and takes one output
    return "continues" if "update_recurrent_state(" not in source or "initial_state" in source else "steps"


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of packed tokens [B, T]. Padding comes after a row's own. `parents` are the rows whose states
    they continue from."""

    token_BT: Tensor
    parent_B: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Ints], device: torch.device, parents: Sequence[int] | None = None) -> _Block:
        # More than one token: a layer may compute a single one after a state in place, without a gradient.
        longest = max(len(rows[0]), 1 if parents is None else 2)
        tokens = np.stack([np.concatenate([row, np.repeat(row[:1], longest - len(row))]) for row in rows])
        parent_B = None if parents is None else torch.tensor(parents, device=device)
        return cls(torch.from_numpy(tokens).to(device), parent_B)

    @property
    def real_BT(self) -> Tensor:
        """True for places that are not padding, which repeats a row's first token."""
        real_BT = self.token_BT != self.token_BT[:, :1]
        real_BT[:, 0] = True
        return real_BT


class StateRows:
    """Packed sequences as rows of state layers.

    A root segment that several sequences share is a row, whose state they continue from. It has no padding:
    that would show in the state. Other sequences are rows from their start on, padded to like lengths. So are
    all if layers take no more than one token after a state (not `continues`). What rows share beyond a state
    is computed in each of them.
    """

    def __init__(
        self, segments: Segments, device: torch.device, *, continues: bool = True, keep: bool = False
    ) -> None:
        spans = zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)
        tokens = [np.arange(start, start + length) for start, length in spans]
        prefixes, before = segments.prefixes.tolist(), segments.before()
        inner = set(prefixes)
        later: dict[int, list[Ints]] = {i: [] for i, prefix in enumerate(prefixes) if prefix < 0}
        roots: list[int] = []
        for i, prefix in enumerate(prefixes):
            roots.append(i if prefix < 0 else roots[prefix])
            if prefix >= 0 and i not in inner:
                whole_row = np.concatenate([before[i], tokens[i]])
                later[roots[i]].append(whole_row[len(tokens[roots[i]]) :])
        first: dict[int, list[int]] = {}
        whole: list[Ints] = []
        for i, others in later.items():
            if keep or (continues and len(others) > 1):
                first.setdefault(len(tokens[i]), []).append(i)
            elif others:
                whole += [np.concatenate([tokens[i], path]) for path in others]
            else:
                whole.append(tokens[i])
        self.kept = [i for same in first.values() for i in same]
        """The segments whose states are kept, in the order of their rows."""
        row_of = {i: row for row, i in enumerate(self.kept)}
        rest = sorted(((path, row_of[i]) for i in self.kept for path in later[i]), key=lambda x: -len(x[0]))
        whole.sort(key=lambda row: -len(row))
        self._first = [_Block.of([tokens[i] for i in same], device) for same in first.values()]
        self._blocks = [_Block.of(whole[a:b], device) for a, b in _cuts([len(row) for row in whole])]
        for a, b in _cuts([len(row) for row, _ in rest]):
            rows, parents = zip(*rest[a:b], strict=True)
            self._blocks.append(_Block.of(rows, device, parents))
        # Where each packed token's output is among those of all rows; of a prompt in several rows, the last.
        token = torch.cat([block.token_BT.flatten() for block in (*self._first, *self._blocks)]).cpu()
        real = torch.cat([block.real_BT.flatten() for block in (*self._first, *self._blocks)]).cpu()
        back = np.empty(sum(map(len, tokens)), dtype=np.int64)
        back[token[real].numpy()] = real.nonzero().squeeze(1).numpy()
        self._back_N = torch.from_numpy(back).to(device)

    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> tuple[Tensor, States]:
        """Return the output of packed tokens [N, H], and the states of the segments that are `kept`."""
        outs: list[Tensor] = []
        kept: list[States] = []
        for block in self._first:
            out, states = layer.run(_gather(hidden_NH, block.token_BT))
            outs.append(out.flatten(0, 1))
            kept.append(states)
        held = {name: torch.cat([states[name] for states in kept]) for name in (kept[0] if kept else ())}
        for block in self._blocks:
            before = None
            if block.parent_B is not None:
                before = {name: state.index_select(0, block.parent_B) for name, state in held.items()}
            out, _ = layer.run(_gather(hidden_NH, block.token_BT), before)
            outs.append(out.flatten(0, 1))
        return torch.cat(outs).index_select(0, self._back_N), held


def _gather(hidden_NH: Tensor, token_BT: Tensor) -> Tensor:
    return hidden_NH.index_select(0, token_BT.flatten()).view(*token_BT.shape, -1)


def _cuts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, longest first, to be padded to one length: with a quarter of padding at most, or
    too little of it to be worth a further call."""
    first = real = 0
    for i, length in enumerate(lengths):
        padded = lengths[first] * (i + 1 - first)
        if padded - real - length > max(_FEW_TOKENS, padded / 4):
            yield first, i
            first, real = i, 0
        real += length
    if lengths:
        yield first, len(lengths)
