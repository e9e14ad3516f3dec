"""KV memory: set aside once, one slot per running sequence, and the layouts that fill and read it.

Running sequences are always slots 0..B-1, so decoding reads a plain view of the memory, without a gather.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from practicum.errors import EngineError

RUN_COST = 512
"""Padding, in positions, that takes about as long as one more attention call."""


@dataclass(slots=True)
class PromptKv:
    """A prompt's keys and values [layers, kv heads, P, D]."""

    keys: Tensor
    values: Tensor

    def copy(self) -> PromptKv:
        """The same in memory of its own, so that the batch it was computed in can be freed."""
        return PromptKv(self.keys.clone(), self.values.clone())

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def lazy_zeros(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on the CPU in pages of their own, which take no memory until they are written.

    They go back to the system with the tensor, where an allocator may keep what it once had.
    """
    if like.device.type != "cpu":
        return like.new_zeros(size)
    count = math.prod(size) * like.itemsize
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return like.new_zeros(size)
    pages = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:count].view(like.dtype).view(size)


class KvMemory:
    """keys and values [layers, slots, kv heads, context, D], all 0 at first.

    Zeros, because attention multiplies what lies behind a sequence's end by 0, and 0 x NaN is NaN.
    """

    def __init__(self, like: PromptKv, slots: int, context: int) -> None:
        def allocate(part: Tensor) -> Tensor:
            layers, heads, _, width = part.shape
            return lazy_zeros((layers, slots, heads, context, width), part)

        self.keys, self.values = allocate(like.keys), allocate(like.values)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def put_prompt(self, prompt: PromptKv, first: int, count: int) -> None:
        """Copy a prompt into `count` slots from `first` on."""
        length = prompt.keys.shape[2]
        for memory, part in ((self.keys, prompt.keys), (self.values, prompt.values)):
            memory[:, first : first + count, :, :length] = part.unsqueeze(1)

    def prompt(self, slot: int, length: int) -> PromptKv:
        """The first `length` positions of a slot, as views."""
        return PromptKv(self.keys[:, slot, :, :length], self.values[:, slot, :, :length])

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        for memory in (self.keys, self.values):
            memory[:, target, :, :length] = memory[:, source, :, :length]


class CausalLayout:
    """Packed sequences, each attending causally to itself.

    Sequences are padded on the right, where causal attention never looks, to a length that depends on their
    own alone (`padded_length`): a sequence's numbers do not depend on its neighbours.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._buckets = [
            tuple(index.to(device) for index in _bucket_indices(bucket)) for bucket in _alike(lengths)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of packed tokens; see `models.attention.Layout`."""
        del layer
        out = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for padded_GP, real_M, token_M in self._buckets:
            q, k, v = (x[padded_GP].transpose(1, 2) for x in (query, key, value))
            grouped = query.shape[1] != key.shape[1]
            rows = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            out[token_M] = rows.transpose(1, 2).flatten(0, 1)[real_M]
        return out


def padded_length(length: int) -> int:
    """The next multiple of 16; above 128, of a step that grows with the length (an eighth of it at most)."""
    step = max(16, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


def _alike(lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """(start, length) of packed sequences in buckets of one padded length."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    buckets: dict[int, list[tuple[int, int]]] = {}
    for end, length in zip(ends, lengths, strict=True):
        buckets.setdefault(padded_length(length), []).append((end - length, length))
    return list(buckets.values())


def _bucket_indices(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Token at each padded place [G, P]; the padded places that are real [M]; their tokens [M]."""
    start_G1 = torch.tensor([start for start, _ in spans]).unsqueeze(1)
    length_G1 = torch.tensor([length for _, length in spans]).unsqueeze(1)
    place_P = torch.arange(padded_length(spans[0][1]))
    real_GP = place_P < length_G1
    padded_GP = torch.where(real_GP, start_G1 + place_P, start_G1)
    return padded_GP, real_GP.flatten().nonzero().squeeze(1), padded_GP[real_GP]


class PrefillLayout(CausalLayout):
    """Causal attention that keeps every layer's keys and values."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self._lengths = list(lengths)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of packed tokens; see `models.attention.Layout`."""
        self._keys[layer], self._values[layer] = key, value
        return super().attend(layer, query, key, value, scale)

    def prompts(self) -> list[PromptKv]:
        """Keys and values of each prompt, as views of the batch's."""
        layers = sorted(self._keys)
        if not layers or layers != list(range(len(layers))):
            raise EngineError(f"packed attention saw layers {layers}; the torch engine needs all from 0 on")
        both = [torch.stack([kept[i] for i in layers]) for kept in (self._keys, self._values)]
        keys, values = (x.transpose(1, 2).split(self._lengths, dim=2) for x in both)
        return [PromptKv(k, v) for k, v in zip(keys, values, strict=True)]


class DecodeLayout:
    """One new token for each of the slots 0..B-1, attending to what its slot holds and to itself."""

    def __init__(self, memory: KvMemory, length_B: Tensor) -> None:
        self._memory = memory
        slots, heads, context = memory.keys.shape[1:4]
        lane_BH = torch.arange(slots * heads, device=length_B.device).view(slots, heads)[: len(length_B)]
        self._place_M = (lane_BH * context + length_B.unsqueeze(1)).view(-1)
        longest = int(length_B.max()) + 1
        self._runs = [(0, len(length_B), longest)] if longest <= RUN_COST else runs(length_B.tolist())
        places_L = torch.arange(longest, device=length_B.device)
        mask_BL = torch.zeros(len(length_B), longest, dtype=memory.keys.dtype, device=length_B.device)
        mask_BL.masked_fill_(places_L > length_B.unsqueeze(1), float("-inf"))
        self._mask_B11L = mask_BL[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the new keys and values, then attend; see `models.attention.Layout`."""
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        for memory, new in ((keys, key), (values, value)):
            width = new.shape[-1]
            memory.view(-1, width).index_copy_(0, self._place_M, new.reshape(-1, width))
        # The query heads that share a kv head become its query length: no key is repeated.
        folded = query.unflatten(1, (key.shape[1], -1))
        outs = [
            scaled_dot_product_attention(
                folded[first:end],
                keys[first:end, :, :longest],
                values[first:end, :, :longest],
                self._mask_B11L[first:end, :, :, :longest],
                scale=scale,
            )
            for first, end, longest in self._runs
        ]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1, 2)


def runs(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbouring slots that attend together, (first, end, longest), with the new token counted in.

    A run pads its rows to the longest of them: slots are parted where that costs more than a further call.
    """
    found: list[tuple[int, int, int]] = []
    for slot, length in enumerate(lengths):
        length += 1
        if found:
            first, end, longest = found[-1]
            padding = (end - first) * max(0, length - longest) + max(0, longest - length)
            if padding <= RUN_COST:
                found[-1] = (first, slot + 1, max(longest, length))
                continue
        found.append((slot, slot + 1, length))
    return found
