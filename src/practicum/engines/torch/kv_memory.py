"""KV memory: one slot per running sequence, grown with the sequences, and the layouts that fill and read it.

Running sequences always use slots 0..B-1, so decoding reads a view of the memory without a gather.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from practicum.cpu.batch_invariance import ROWS, WHOLE, padded_keys, padded_rows
from practicum.cpu.threaded_attention import scaled_dot_product_attention
from practicum.engines.torch.shared_pages import SharedPages, shareable
from practicum.errors import EngineError
from practicum.models import padded_attention
from practicum.models.packed_attention import PackedLayout
from practicum.models.padded_attention import AttentionRule, PaddedRows, written_out
from practicum.models.state_layers import StateLayer, StateRows
from practicum.recipe.counts import KV_POSITIONS, KV_SPARE

StateName = tuple[int, str]
RUN_COST = 512
"""Padding in positions that costs about as much as another attention call."""


@dataclass(slots=True)
class PromptKv:
    """Cache of a prompt: keys and values [layers, kv heads, P, D] of attention layers, and the final states
    of recurrent layers, by number and name."""

    keys: Tensor
    values: Tensor
    layers: Mapping[int, int] = field(default_factory=dict)
    """Index of each attention layer among the keys. Empty if all layers attend."""
    states: Mapping[StateName, Tensor] = field(default_factory=dict)

    def copy(self) -> PromptKv:
        """Copy them, so that the batch they were computed in can be freed."""
        states = {name: state.clone() for name, state in self.states.items()}
        return PromptKv(self.keys.clone(), self.values.clone(), self.layers, states)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, *self.states.values()))


def lazy_zeros(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros. On the CPU, they use separate pages, which take no memory until written and are returned
    to the system with the tensor."""
    if like.device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return like.new_zeros(size)
    count = math.prod(size) * like.itemsize
    pages = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:count].view(like.dtype).view(size)


class KvMemory:
    """Keys and values [layers, slots, kv heads, positions, D], initially 0.

    Memory must be zero-filled because attention multiplies positions after a sequence's end by 0, and 0 × NaN
    is NaN. It grows to the longest running sequence × the slots in use, up to `context` and `slots`. A slot
    has room for attention's padding.
    """

    def __init__(self, like: PromptKv, slots: int, context: int) -> None:
        self._slots, self._context = slots, padded_keys(context)
        self.longest = 0
        """Positions of the longest sequence in use."""
        shape = slots, min(padded_keys(KV_POSITIONS), self._context)
        self.keys, self.values = (_allocate(part, *shape) for part in (like.keys, like.values))
        self.layers = like.layers or {layer: layer for layer in range(len(like.keys))}
        self.states = {name: lazy_zeros((slots, *x.shape), x) for name, x in like.states.items()}
        """States [slots, ...], whose size does not depend on the sequence length."""
        self._pages: dict[int, SharedPages] = {}
        """The pages that slots share with others, by slot."""

    def reserve(self, slots: int, length: int) -> None:
        """Make room for this many slots in use, the longest with `length` positions."""
        before, self.longest, (held, room) = self.longest, length, self.keys.shape[1:4:2]
        if slots <= held and length <= room:
            return
        fitting = min(self._context, padded_keys(math.ceil(KV_SPARE * length)))
        if length > room:
            # The memory of unused slots is reused for longer sequences.
            shape = (slots if slots > held or 2 * slots <= held else held), fitting
        else:
            shape = min(self._slots, max(slots, 2 * held)), (fitting if 2 * fitting <= room else room)
        # One after the other, so that the old memory of the first is free before the second is allocated.
        self.keys = _moved(self.keys, shape, before)
        self.values = _moved(self.values, shape, before)
        most = min(before, shareable((self.keys, self.values), length))
        pages, self._pages = self._pages, {}
        for slot, shared in pages.items():
            if slot < shape[0] and shared.positions <= most:
                self._put_pages(shared, slot)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, *self.states.values()))

    def put_prompt(self, prompt: PromptKv, first: int, count: int) -> None:
        """Copy a prompt into `count` slots from `first`, the last ones in use."""
        length = prompt.keys.shape[2]
        self.reserve(first + count, max(length, self.longest if first else 0))
        for slot in range(first, first + count):
            self._pages.pop(slot, None)
        for memory, part in ((self.keys, prompt.keys), (self.values, prompt.values)):
            memory[:, first : first + count, :, :length] = part.unsqueeze(1)
        for name, state in prompt.states.items():
            self.states[name][first : first + count] = state

    def prompt(self, slot: int, length: int) -> PromptKv:
        """Return the first `length` positions of a slot, as views. States are those after the whole
        sequence."""
        keys, values = (memory[:, slot, :, :length] for memory in (self.keys, self.values))
        return PromptKv(keys, values, self.layers, {name: x[slot] for name, x in self.states.items()})

    def states_of(self, layer: StateLayer) -> dict[str, Tensor]:
        """Return the states [slots, ...] of a layer by name."""
        return {name: state for (number, name), state in self.states.items() if number == layer.number}

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values [N, kv heads, D] of a layer at flat indices. Return all of the layer."""
        keys, values = self.keys[self.layers[layer]], self.values[self.layers[layer]]
        for memory, new in ((keys, key), (values, value)):
            width = new.shape[-1]
            memory.view(-1, width).index_copy_(0, places, new.reshape(-1, width))
        return keys, values

    def move(self, source: int, target: int, length: int, *, split: bool = False) -> None:
        """Copy the first `length` positions of one slot into another. If the sequences `split`, the first
        goes on, and both share the pages that they can."""
        pages, same = self._pages.get(source), 0
        if pages is None and split and (count := shareable((self.keys, self.values), length)):
            pages = SharedPages([x[:, source, :, :count] for x in (self.keys, self.values)])
            self._put_pages(pages, source)
        self._pages.pop(target, None)
        if pages is not None:
            self._put_pages(pages, target)
            same = pages.positions
        for memory in (self.keys, self.values):
            memory[:, target, :, same:length] = memory[:, source, :, same:length]
        for state in self.states.values():
            state[target] = state[source]

    def _put_pages(self, pages: SharedPages, slot: int) -> None:
        for number, memory in enumerate((self.keys, self.values)):
            pages.put(number, memory[:, slot])
        self._pages[slot] = pages


def _allocate(like: Tensor, slots: int, room: int) -> Tensor:
    layers, heads, _, width = like.shape
    return lazy_zeros((layers, slots, heads, room, width), like)


def _moved(memory: Tensor, shape: tuple[int, int], length: int) -> Tensor:
    """Copy the first `length` positions of the common slots to memory of another shape."""
    new = _allocate(memory[:, 0], *shape)
    slots, kept = min(memory.shape[1], new.shape[1]), min(length, memory.shape[3], new.shape[3])
    new[:, :slots, :, :kept] = memory[:, :slots, :, :kept]
    return new


class PrefillLayout:
    """Packed prompts with causal attention within each. Keeps every layer's keys and values."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._packed = PackedLayout.of_sequences(lengths).to(device)
        self.narrow = self._packed.narrow
        self._lengths = list(lengths)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows: StateRows | None = None
        self._states: dict[StateName, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        self._keys[layer], self._values[layer] = key, value
        return self._packed.attend(layer, query, key, value, rule)

    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        if self._rows is None:
            self._rows = StateRows(self._packed.segments, hidden_NH.device, keep=True)
        out_NH, states = self._rows.mix(layer, hidden_NH)
        self._states |= {(layer.number, name): state for name, state in states.items()}
        return out_NH

    def prompts(self) -> list[PromptKv]:
        """Return keys and values of each prompt, as views of the batch's."""
        layers = sorted(self._keys)
        places = {layer: place for place, layer in enumerate(layers)}
        if len({(self._keys[i].shape, self._values[i].shape) for i in layers}) > 1:
            raise EngineError("the torch engine needs keys and values of one shape in all layers that attend")
        both = [torch.stack([kept[i] for i in layers]) for kept in (self._keys, self._values) if layers]
        if not layers:  # all layers carry a state
            both = [torch.zeros(0, sum(self._lengths), 1, 1, device=self._packed.back_N.device)] * 2
        keys, values = (x.transpose(1, 2).split(self._lengths, dim=2) for x in both)
        rows = {} if self._rows is None else {i: row for row, i in enumerate(self._rows.kept)}
        states = [{name: x[rows[i]] for name, x in self._states.items()} for i in range(len(keys))]
        return [PromptKv(k, v, places, own) for k, v, own in zip(keys, values, states, strict=True)]


class DecodeLayout:
    """One new token for each of the slots 0..B-1, which attends to its slot and to itself."""

    def __init__(self, memory: KvMemory, length_B: Tensor) -> None:
        self._memory = memory
        longest = int(length_B.max()) + 1
        memory.reserve(len(length_B), longest)
        slots, heads, context = memory.keys.shape[1:4]
        lanes = torch.arange(slots * heads, device=length_B.device).view(slots, heads)[: len(length_B)]
        self._places = (lanes * context + length_B.unsqueeze(1)).view(-1)
        longest = padded_keys(longest)
        self._runs = [(0, len(length_B), longest)] if longest <= WHOLE else runs(length_B.tolist())
        self._length_B1, self._longest = length_B.unsqueeze(1), longest
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        keys, values = self._memory.write(layer, self._places, key, value)
        # Query heads that share a kv head become its query length, so no key is repeated.
        folded = query.unflatten(1, (key.shape[1], -1))
        group, mask = folded.shape[2], self._mask(rule.window)
        if not rule.is_written_out:
            folded = pad(folded, (0, 0, 0, -group % ROWS))
        outs = []
        for first, end, longest in self._runs:
            q, run_mask = folded[first:end], mask[first:end, :, :, :longest]
            k, v = keys[first:end, :, :longest], values[first:end, :, :longest]
            if rule.is_written_out:
                out = written_out(q.unsqueeze(3), k, v, run_mask.unsqueeze(1), rule).squeeze(3)
            else:
                out = scaled_dot_product_attention(q, k, v, run_mask, scale=rule.scale)
            outs.append(out)
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[:, :, :group].flatten(1, 2)

    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        rows = len(hidden_NH)
        return _step(layer, hidden_NH.unsqueeze(1), self._memory.states_of(layer), slice(rows)).squeeze(1)

    def _mask(self, window: int | None) -> Tensor:
        """Return the additive attention mask [B, 1, 1, J] of layers with this window."""
        if window not in self._masks:
            place_J = torch.arange(self._longest, device=self._length_B1.device)
            hidden_BJ = place_J > self._length_B1
            if window is not None:
                hidden_BJ |= place_J <= self._length_B1 - window
            mask_BJ = torch.zeros(hidden_BJ.shape, dtype=self._memory.keys.dtype, device=hidden_BJ.device)
            self._masks[window] = mask_BJ.masked_fill_(hidden_BJ, float("-inf"))[:, None, None]
        return self._masks[window]


def _step(layer: StateLayer, rows_BTH: Tensor, memory: Mapping[str, Tensor], slots: slice | Tensor) -> Tensor:
    """Continue the sequences of these slots, and store their new states."""
    out_BTH, states = layer.run(rows_BTH, {name: state[slots].clone() for name, state in memory.items()})
    for name, state in states.items():
        memory[name][slots] = state
    return out_BTH


def runs(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ranges of slots that attend together as (first, end, longest), including new token and padding.
    A range pads its rows to the longest. It is split where padding costs more than another call."""
    parts: list[tuple[int, int, int]] = []
    for slot, length in enumerate(map(padded_keys, (length + 1 for length in lengths))):
        if parts:
            first, end, longest = parts[-1]
            padding = (end - first) * max(0, length - longest) + max(0, longest - length)
            if padding <= RUN_COST:
                parts[-1] = (first, slot + 1, max(longest, length))
                continue
        parts.append((slot, slot + 1, length))
    return parts


class Extension(NamedTuple):
    """A slot, its number of filled positions, and the number of new tokens."""

    slot: int
    filled: int
    new: int

    @property
    def whole(self) -> int:
        return self.filled + self.new


@dataclass(frozen=True, slots=True)
class _SlotBlock:
    """Adjacent slots that attend together: indices of their queries, and positions in their sequences."""

    first: int
    query_BQ: Tensor
    rows: PaddedRows
    real_M: Tensor
    """Mask of the real queries among padded ones."""
    token_M: Tensor
    """Indices among the packed tokens."""


class ExtendLayout:
    """Packed new tokens of several slots. Each attends to its slot and causally to the slot's new tokens.
    Their keys and values are written into the slots."""

    def __init__(self, memory: KvMemory, extensions: Sequence[Extension], device: torch.device) -> None:
        self._memory = memory
        memory.reserve(
            max(e.slot for e in extensions) + 1, max(memory.longest, *(e.whole for e in extensions))
        )
        self._extensions = extensions
        heads, context = memory.keys.shape[2:4]
        slot_N = torch.cat([torch.full((e.new,), e.slot) for e in extensions])
        position_N = torch.cat([torch.arange(e.filled, e.whole) for e in extensions])
        lanes = slot_N.unsqueeze(1) * heads + torch.arange(heads)
        self._places = (lanes * context + position_N.unsqueeze(1)).view(-1).to(device)
        self._blocks: list[_SlotBlock] = []
        start = 0
        for block in blocks(extensions):
            self._blocks.append(_block(block, start, device))
            start += sum(e.new for e in block)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        keys, values = self._memory.write(layer, self._places, key, value)
        out = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for block in self._blocks:
            slots, longest = slice(block.first, block.first + len(block.query_BQ)), block.rows.keys
            skipped, rows = block.rows.within(rule.window)
            k, v = (x[slots, :, skipped:longest] for x in (keys, values))
            padded = padded_attention.attend(rows, query[block.query_BQ], k, v, rule)
            out[block.token_M] = padded.flatten(0, 1)[block.real_M]
        return out

    def mix(self, layer: StateLayer, hidden_NH: Tensor) -> Tensor:
        """Continue slots with equal numbers of new tokens together, because padding would change their
        states."""
        out_NH, memory, start = torch.empty_like(hidden_NH), self._memory.states_of(layer), 0
        alike: dict[int, list[tuple[int, int]]] = {}
        for extension in self._extensions:
            alike.setdefault(extension.new, []).append((extension.slot, start))
            start += extension.new
        for new, rows in alike.items():
            slot_B, start_B = torch.tensor(rows, device=hidden_NH.device).T
            token_BT = start_B.unsqueeze(1) + torch.arange(new, device=hidden_NH.device)
            steps = [token_BT] if layer.continues else token_BT.split(1, 1)
            for token_BT in steps:
                out_NH[token_BT] = _step(layer, hidden_NH[token_BT], memory, slot_B)
        return out_NH


def blocks(extensions: Sequence[Extension]) -> list[list[Extension]]:
    """Group extensions of neighbouring slots that attend together. They are padded to the maximum queries and
    positions of the group, which is split where padding costs more than another call."""
    groups: list[list[Extension]] = []
    most = Extension(0, 0, 0)
    for extension in extensions:
        if groups and groups[-1][-1].slot + 1 == extension.slot:
            count = len(groups[-1])
            new, whole = max(most.new, extension.new), max(most.whole, extension.whole)
            apart = count * most.new * most.whole + extension.new * extension.whole
            if (count + 1) * new * whole - apart <= RUN_COST:
                groups[-1].append(extension)
                most = Extension(0, whole - new, new)
                continue
        groups.append([extension])
        most = extension
    return groups


def _block(extensions: Sequence[Extension], start: int, device: torch.device) -> _SlotBlock:
    _, filled, new = (torch.tensor(column).unsqueeze(1) for column in zip(*extensions, strict=True))
    start_B1 = start + new.cumsum(0) - new
    q_Q = torch.arange(padded_rows(int(new.max())))
    real_BQ = q_Q < new
    query_BQ = torch.where(real_BQ, start_B1 + q_Q, start_B1)
    keys = padded_keys(int((filled + new).max()))
    return _SlotBlock(
        extensions[0].slot,
        query_BQ.to(device),
        PaddedRows(filled.squeeze(1), new.squeeze(1), len(q_Q), keys).to(device),
        real_BQ.flatten().nonzero().squeeze(1).to(device),
        query_BQ[real_BQ].to(device),
    )
