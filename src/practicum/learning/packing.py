"""Rows without padding: which rows go into one forward pass, and how they lie in it.

Rows with equal prompts share one prompt segment. A packed input is every distinct prompt once, then each
row's response without its last token (which predicts nothing), with positions that restart after the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from practicum.errors import DataError
from practicum.learning.layout import Segments, SharedPromptLayout


@dataclass(slots=True)
class Packed:
    """One micro-batch, ready for a forward pass. M counts response tokens, in row order."""

    ids_N: Tensor
    positions_N: Tensor
    gather_M: Tensor
    """Packed index of the hidden state that predicts each response token."""
    target_M: Tensor
    row_lengths: list[int]
    """Response tokens of each row; they add up to M."""
    layout: SharedPromptLayout

    def to(self, device: torch.device) -> Packed:
        """The same micro-batch on another device."""
        if self.ids_N.device == device:
            return self
        moved = [x.to(device) for x in (self.ids_N, self.positions_N, self.gather_M, self.target_M)]
        return Packed(*moved, self.row_lengths, self.layout.to(device))


def prompt_names(prompts: Sequence[Tensor]) -> list[bytes]:
    """A name for each prompt; rows with equal prompt ids have equal names."""
    for i, prompt in enumerate(prompts):
        if prompt.shape[0] == 0:
            raise DataError(f"row {i} has an empty prompt; its first token has nothing to follow from")
    return [prompt.numpy().tobytes() for prompt in prompts]


def plan_microbatches(
    names: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    token_budget: int,
    sessions: Sequence[int] | None = None,
) -> list[list[int]]:
    """Row indices of each micro-batch, at most `token_budget` packed tokens each.

    Rows with equal prompt names stay together where they fit; rows of one session always do, if `sessions`
    is given. A row or session longer than the budget goes alone. Rows without response tokens are in none.
    """
    units: dict[Hashable, list[int]] = {}
    for i, length in enumerate(response_lengths):
        if length:
            units.setdefault(i if sessions is None else sessions[i], []).append(i)
    bundles: dict[Hashable, list[list[int]]] = {}
    for unit in units.values():
        bundles.setdefault(names[unit[0]], []).append(unit)

    def longest(unit: list[int]) -> int:
        return max(prompt_lengths[i] + response_lengths[i] for i in unit)

    def cost(rows: Sequence[int], present: set[Hashable]) -> int:
        new = {names[i]: prompt_lengths[i] for i in rows if names[i] not in present}
        return sum(new.values()) + sum(response_lengths[i] - 1 for i in rows)

    # Longest first: rows of a micro-batch are alike, and what does not fit in memory fails at once.
    for bundle in bundles.values():
        bundle.sort(key=lambda unit: (-longest(unit), unit[0]))
    batches: list[list[int]] = []
    present: set[Hashable] = set()
    used = token_budget + 1
    for bundle in sorted(bundles.values(), key=lambda b: (-longest(b[0]), b[0][0])):
        whole = cost([i for unit in bundle for i in unit], set())
        if whole <= token_budget < used + whole:
            used = token_budget + 1
        for unit in bundle:
            more = cost(unit, present)
            if used + more > token_budget:
                batches.append([])
                present, used, more = set(), 0, cost(unit, set())
            batches[-1] += unit
            present.update(names[i] for i in unit)
            used += more
    return batches


def pack(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], names: Sequence[Hashable]
) -> Packed:
    """Lay out rows (CPU tensors of ids); every row has a prompt and at least one response token."""
    first_row: dict[Hashable, int] = {}
    for i, name in enumerate(names):
        first_row.setdefault(name, i)
    place = {name: p for p, name in enumerate(first_row)}
    parent = np.array([place[name] for name in names])
    prompt_lengths = np.array([prompts[i].shape[0] for i in first_row.values()])
    response_lengths = np.array([response.shape[0] for response in responses])

    inputs = [prompts[i] for i in first_row.values()] + [response[:-1] for response in responses]
    lengths = np.concatenate([prompt_lengths, response_lengths - 1])
    starts = lengths.cumsum() - lengths
    base = np.concatenate([np.zeros_like(prompt_lengths), prompt_lengths[parent]])
    parents = np.concatenate([np.full_like(prompt_lengths, -1), parent])
    within = np.arange(lengths.sum()) - np.repeat(starts, lengths)

    # The first token of a response is predicted by its prompt's last token, the others by their forerunners.
    row_starts = response_lengths.cumsum() - response_lengths
    own_starts = starts[len(prompt_lengths) :]
    gather = np.arange(response_lengths.sum()) + np.repeat(own_starts - 1 - row_starts, response_lengths)
    gather[row_starts] = (starts + lengths)[: len(prompt_lengths)][parent] - 1
    return Packed(
        ids_N=torch.cat(inputs),
        positions_N=torch.from_numpy(within + np.repeat(base, lengths)),
        gather_M=torch.from_numpy(gather),
        target_M=torch.cat(list(responses)),
        row_lengths=response_lengths.tolist(),
        layout=SharedPromptLayout(Segments(starts, lengths, parents)),
    )
