"""Prompts that go on from what their slots of the KV memory hold: attention of the tokens behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from practicum.engines.torch.kv_memory import RUN_COST, KvMemory
from practicum.engines.torch.prefix_layout import attend_padded


class Extension(NamedTuple):
    """A slot, how many positions of it are filled, and how many tokens come behind them."""

    slot: int
    filled: int
    new: int

    @property
    def whole(self) -> int:
        return self.filled + self.new


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring slots that attend together: places of their queries, and which positions these see."""

    first: int
    query_bQ: Tensor
    mask_b1QL: Tensor
    real_M: Tensor
    """Which of the padded queries are real."""
    token_M: Tensor
    """Their places among the packed tokens."""


class ExtendLayout:
    """Packed tokens of several slots, one slot behind the other: each attends to what its slot holds, and
    causally to those that come with it. Their keys and values are written into the slots."""

    def __init__(self, memory: KvMemory, extensions: Sequence[Extension], device: torch.device) -> None:
        self._memory = memory
        heads, context = memory.keys.shape[2:4]
        slot_N = torch.cat([torch.full((e.new,), e.slot) for e in extensions])
        position_N = torch.cat([torch.arange(e.filled, e.whole) for e in extensions])
        lane_NH = slot_N.unsqueeze(1) * heads + torch.arange(heads)
        self._place_M = (lane_NH * context + position_N.unsqueeze(1)).view(-1).to(device)
        self._blocks: list[_Block] = []
        start = 0
        for block in blocks(extensions):
            self._blocks.append(_block(block, start, device))
            start += sum(e.new for e in block)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the new keys and values, then attend; see `models.attention.Layout`."""
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        for memory, new in ((keys, key), (values, value)):
            width = new.shape[-1]
            memory.view(-1, width).index_copy_(0, self._place_M, new.reshape(-1, width))
        out = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for block in self._blocks:
            slots, longest = slice(block.first, block.first + len(block.query_bQ)), block.mask_b1QL.shape[3]
            k, v = (x[slots, :, :longest] for x in (keys, values))
            padded = attend_padded(query[block.query_bQ], k, v, block.mask_b1QL, scale)
            out[block.token_M] = padded[block.real_M]
        return out


def blocks(extensions: Sequence[Extension]) -> list[list[Extension]]:
    """Extensions of neighbouring slots that attend together.

    They are padded to the most queries and positions among them: parted where that costs more than a call.
    """
    found: list[list[Extension]] = []
    most = Extension(0, 0, 0)
    for extension in extensions:
        if found and found[-1][-1].slot + 1 == extension.slot:
            count = len(found[-1])
            new, whole = max(most.new, extension.new), max(most.whole, extension.whole)
            apart = count * most.new * most.whole + extension.new * extension.whole
            if (count + 1) * new * whole - apart <= RUN_COST:
                found[-1].append(extension)
                most = Extension(0, whole - new, new)
                continue
        found.append([extension])
        most = extension
    return found


def _block(extensions: Sequence[Extension], start: int, device: torch.device) -> _Block:
    _, filled, new = (torch.tensor(column).unsqueeze(1) for column in zip(*extensions, strict=True))
    start_b1 = start + new.cumsum(0) - new
    q_Q, place_L = torch.arange(int(new.max())), torch.arange(int((filled + new).max()))
    real_bQ = q_Q < new
    query_bQ = torch.where(real_bQ, start_b1 + q_Q, start_b1)
    mask_bQL = place_L <= (filled + q_Q).unsqueeze(2)
    return _Block(
        extensions[0].slot,
        query_bQ.to(device),
        mask_bQL.unsqueeze(1).to(device),
        real_bQ.flatten().nonzero().squeeze(1).to(device),
        query_bQ[real_bQ].to(device),
    )
