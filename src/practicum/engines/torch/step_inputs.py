"""Sequences become the inputs of one forward call: packed tokens, their positions, their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from practicum.engines.torch.request_queue import PromptKey
from practicum.models.images import Images
from practicum.models.vision import AXES, is_vision, picture_tokens, sequence_positions


@dataclass(slots=True)
class Inputs:
    """Packed tokens. A vision model's positions are [N, D]; only it has pictures and shifts other than 0."""

    ids_N: Tensor
    positions_N: Tensor
    shifts: Sequence[int]
    """Of each sequence: what is added to the number of tokens before a later token for its position."""
    images: Sequence[Images] = ()
    picture_N: Tensor | None = None
    """Which tokens stand for pieces of the pictures; None without pictures."""
    experts_N: Tensor | None = None
    """Experts that tokens are to take [N, L, E], -1 where the routers choose; None: they always do."""


def pack(
    config: Any,
    sequences: Sequence[PromptKey],
    device: torch.device,
    tails: Sequence[Sequence[int]] = (),
    parents: Sequence[int] = (),
) -> Inputs:
    """Sequences one behind the other, then tails that go on from the sequences with the numbers `parents`."""
    ids = torch.tensor([i for part in (*(s.ids for s in sequences), *tails) for i in part], device=device)
    vision = is_vision(config)
    positions, shifts = _positions(config, sequences)
    for parent, tail in zip(parents, tails, strict=True):
        at = len(sequences[parent]) + shifts[parent]
        straight = torch.arange(at, at + len(tail))
        positions.append(straight.unsqueeze(1).expand(-1, AXES) if vision else straight)
    positions_N = torch.cat(positions).to(device)
    experts_N = _known_experts([len(s) for s in sequences], [s.experts for s in sequences], device)
    images = [s.images for s in sequences if s.images is not None]
    if not images:
        return Inputs(ids, positions_N, shifts, experts_N=experts_N)
    picture_N = torch.cat(
        [picture_tokens(config, s.ids, s.images) for s in sequences]
        + [torch.zeros(len(tail), dtype=torch.bool) for tail in tails]
    )
    return Inputs(ids, positions_N, shifts, images, picture_N.to(device), experts_N)


def pack_rest(
    config: Any, sequences: Sequence[PromptKey], starts: Sequence[int], device: torch.device
) -> Inputs:
    """The tokens of each sequence from its start on, one behind the other; pictures stand before it."""
    positions, shifts = _positions(config, sequences)
    cuts = list(zip(sequences, starts, strict=True))
    ids = torch.tensor([i for s, start in cuts for i in s.ids[start:]], device=device)
    rest = torch.cat([part[start:] for part, start in zip(positions, starts, strict=True)])
    known = [None if s.experts is None else s.experts[start:] for s, start in cuts]
    experts_N = _known_experts([len(s) - start for s, start in cuts], known, device)
    return Inputs(ids, rest.to(device), shifts, experts_N=experts_N)


def _positions(config: Any, sequences: Sequence[PromptKey]) -> tuple[list[Tensor], list[int]]:
    """Positions of each whole sequence, and its shift."""
    if not is_vision(config):
        return [torch.arange(len(s)) for s in sequences], [0] * len(sequences)
    positions = [sequence_positions(config, s.ids, s.images) for s in sequences]
    return positions, [int(p[-1].max()) + 1 - len(p) for p in positions]


def _known_experts(
    lengths: Sequence[int], known: Sequence[Tensor | None], device: torch.device
) -> Tensor | None:
    """Experts [N, L, E] of sequences of which the first tokens' may be known: -1 where they are not."""
    some = next((experts for experts in known if experts is not None and len(experts)), None)
    if some is None:
        return None
    experts_N = some.new_full((sum(lengths), *some.shape[1:]), -1)
    for experts, part in zip(known, experts_N.split(list(lengths)), strict=True):
        if experts is not None:
            part[: len(experts)] = experts
    return experts_N.to(device)
