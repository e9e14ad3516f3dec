"""Pack rows without padding: assign rows to forward passes, and lay them out.

Rows with equal prompts share one prompt segment: equal in tokens, in images, and in recorded experts if
these are replayed. A packed input is every distinct prompt once, then each row's response without its last
token (which predicts nothing), with positions that continue after the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from practicum.dataplane.ragged import Columns, Ragged
from practicum.errors import DataError
from practicum.models.packed_attention import PackedLayout, Segments
from practicum.models.vision import Images, images_of


@dataclass(frozen=True, slots=True)
class RowExtras:
    """Inputs of vision and MoE models for each row, beside its tokens."""

    position_ids: Ragged | None = None
    """Rows [P + R, D]: a position on each axis; vision models."""
    images: Sequence[Images | None] | None = None
    """The images of each row's prompt, in the order of their tokens; vision models."""
    routed_experts: Ragged | None = None
    """Rows [P + R, L, E]: the experts that each token takes instead of its router's choice."""

    @staticmethod
    def of(columns: Columns) -> RowExtras | None:
        """Return those among the columns of a stage, or None."""
        names = [name for name in ("position_ids", "routed_experts") if name in columns]
        images = images_of(columns) if "multi_modal_inputs" in columns else None
        if not names and images is None:
            return None
        return RowExtras(images=images, **{name: columns.ragged(name) for name in names})

    def select(self, rows: Sequence[int]) -> RowExtras:
        positions, images, experts = self.position_ids, self.images, self.routed_experts
        return RowExtras(
            position_ids=None if positions is None else positions.select(rows),
            images=None if images is None else [images[i] for i in rows],
            routed_experts=None if experts is None else experts.select(rows),
        )

    def check(self, tokens: list[int]) -> None:
        """Raise a DataError unless the rows have these numbers of tokens, prompt and response together."""
        for name, column in (("position_ids", self.position_ids), ("routed_experts", self.routed_experts)):
            if column is not None and column.lengths != tokens:
                raise DataError(f"rows of {name} are not as long as their prompts and responses together")
        if self.images is not None and len(self.images) != len(tokens):
            raise DataError(f"{len(tokens)} rows came with images of {len(self.images)}")
        if self.position_ids is None and any(images is not None for images in self.images or ()):
            raise DataError("rows with images need position_ids")


@dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch, ready for a forward pass. N counts input tokens, M response tokens to predict."""

    ids_N: Tensor
    positions_N: Tensor
    """[N], or [N, D] for a model with several position axes."""
    layout: PackedLayout
    gather_M: Tensor
    """Packed index of the hidden state that predicts each response token; rows in the order given."""
    target_M: Tensor
    """The response tokens."""
    column_M: Tensor
    """Where each response token is in the packed columns of the batch; always on the CPU."""
    images: tuple[Images, ...] = ()
    """Images of the distinct prompts that have any, in the order of their tokens; on the CPU."""
    image_prompts: tuple[slice, ...] = ()
    """Where those prompts are among the input tokens."""
    experts_N: Tensor | None = None
    """Experts to replay for each input token [N, L, E], or None if the routers choose."""

    def to(self, device: torch.device) -> Packed:
        if self.ids_N.device == device:
            return self
        names = ("ids_N", "positions_N", "layout", "gather_M", "target_M", "experts_N")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x.to(device) for name, x in parts.items() if x is not None})


class RowSpans:
    """The rows of a batch, ready to be cut into micro-batches."""

    def __init__(self, prompt_ids: Ragged, response_ids: Ragged, extras: RowExtras | None = None) -> None:
        if len(prompt_ids) != len(response_ids):
            raise DataError(f"{len(prompt_ids)} prompts came with {len(response_ids)} responses")
        if 0 in prompt_ids.lengths:
            raise DataError(f"row {prompt_ids.lengths.index(0)} has an empty prompt")
        self.prompts, self.responses = prompt_ids.rows, response_ids.rows
        self.prompt_lengths, self.lengths = prompt_ids.lengths, response_ids.lengths
        if extras is not None:
            extras.check([p + r for p, r in zip(self.prompt_lengths, self.lengths, strict=True)])
        self.extras = extras
        self.names = [self._name(i) for i in range(len(self.prompts))]
        self.starts = np.cumsum([0, *self.lengths])

    def _name(self, i: int) -> Hashable:
        """Return a name that rows have in common if they may share a prompt segment."""
        tokens, extras = self.prompts[i].numpy().tobytes(), self.extras
        if extras is None:
            return tokens
        images = extras.images[i] if extras.images is not None else None
        experts = b""
        if extras.routed_experts is not None:
            experts = extras.routed_experts[i][: self.prompt_lengths[i]].numpy().tobytes()
        return tokens, images.digest if images is not None else b"", experts

    def microbatches(
        self,
        token_budget: int,
        *,
        rows: Sequence[int] | None = None,
        sampled_M: Tensor | None = None,
        sessions: Sequence[int] | None = None,
    ) -> Iterator[Packed]:
        """Yield micro-batches of these rows (all if None), to predict the sampled tokens (all if None).

        Rows with nothing to predict are in none of them. See `plan_microbatches` for `sessions`.
        """
        chosen = range(len(self.lengths)) if rows is None else rows
        if sampled_M is not None:
            sampled = np.concatenate([[0], sampled_M.numpy().cumsum()])
            chosen = [i for i in chosen if sampled[self.starts[i + 1]] > sampled[self.starts[i]]]
        parts = plan_microbatches(
            [self.names[i] for i in chosen],
            [self.prompt_lengths[i] for i in chosen],
            [self.lengths[i] for i in chosen],
            token_budget,
            None if sessions is None else [sessions[i] for i in chosen],
        )
        for part in parts:
            packed = self.pack([chosen[i] for i in part])
            if sampled_M is not None:
                wanted_M = sampled_M[packed.column_M]
                names = ("gather_M", "target_M", "column_M")
                packed = replace(packed, **{name: getattr(packed, name)[wanted_M] for name in names})
            yield packed

    def pack(self, rows: Sequence[int]) -> Packed:
        """Lay out these rows; each must have a response token."""
        place: dict[Hashable, int] = {}
        parent = np.array([place.setdefault(self.names[i], len(place)) for i in rows])
        firsts = [rows[i] for i in np.unique(parent, return_index=True)[1]]
        prompt_lengths = np.array([self.prompt_lengths[i] for i in firsts])
        response_lengths = np.array([self.lengths[i] for i in rows])

        inputs = [self.prompts[i] for i in firsts] + [self.responses[i][:-1] for i in rows]
        lengths = np.concatenate([prompt_lengths, response_lengths - 1])
        starts = lengths.cumsum() - lengths
        base = np.concatenate([np.zeros_like(prompt_lengths), prompt_lengths[parent]])
        prefixes = np.concatenate([np.full_like(prompt_lengths, -1), parent])

        # The first token of a response is predicted by its prompt's last token, the others by the one before.
        row_starts = response_lengths.cumsum() - response_lengths
        own_starts = starts[len(prompt_lengths) :]
        gather = np.arange(response_lengths.sum()) + np.repeat(own_starts - 1 - row_starts, response_lengths)
        gather[row_starts] = (starts + lengths)[parent] - 1
        column = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in rows])
        packed = Packed(
            ids_N=torch.cat(inputs),
            positions_N=torch.from_numpy(np.arange(lengths.sum()) + np.repeat(base - starts, lengths)),
            layout=PackedLayout.of_segments(Segments(starts, lengths, prefixes)),
            gather_M=torch.from_numpy(gather),
            target_M=torch.cat([self.responses[i] for i in rows]),
            column_M=torch.from_numpy(column),
        )
        return packed if self.extras is None else self._add_extras(packed, rows, firsts, self.extras)

    def _add_extras(
        self, packed: Packed, rows: Sequence[int], firsts: Sequence[int], extras: RowExtras
    ) -> Packed:
        """Lay out the rows' extras as their tokens are; `firsts` are the rows whose prompts are packed."""

        def inputs(column: Ragged) -> Tensor:
            prompts = [column[i][: self.prompt_lengths[i]] for i in firsts]
            return torch.cat(prompts + [column[i][self.prompt_lengths[i] : -1] for i in rows])

        if extras.position_ids is not None:
            packed = replace(packed, positions_N=inputs(extras.position_ids))
        if extras.images is not None:
            ends = np.cumsum([0, *(self.prompt_lengths[i] for i in firsts)]).tolist()
            places = [slice(*place) for place in pairwise(ends)]
            shown = [(extras.images[i], place) for i, place in zip(firsts, places, strict=True)]
            packed = replace(
                packed,
                images=tuple(images for images, _ in shown if images is not None),
                image_prompts=tuple(place for images, place in shown if images is not None),
            )
        if extras.routed_experts is not None:
            packed = replace(packed, experts_N=inputs(extras.routed_experts))
        return packed


def plan_microbatches(
    names: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    token_budget: int,
    sessions: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the row indices of each micro-batch, at most `token_budget` packed tokens each.

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
        prompts = {names[i]: prompt_lengths[i] for i in rows if names[i] not in present}
        return sum(prompts.values()) + sum(response_lengths[i] - 1 for i in rows)

    # Longest first: rows of a micro-batch are alike, and what does not fit in memory fails first.
    for bundle in bundles.values():
        bundle.sort(key=lambda unit: (-longest(unit), unit[0]))
    batches: list[list[int]] = []
    present: set[Hashable] = set()
    room = 0
    for bundle in sorted(bundles.values(), key=lambda b: (-longest(b[0]), b[0][0])):
        if room < cost([i for unit in bundle for i in unit], present) <= token_budget:
            room = -1  # not even a unit that costs nothing goes into this micro-batch
        for unit in bundle:
            if not batches or cost(unit, present) > room:
                batches.append([])
                present, room = set(), token_budget
            room -= cost(unit, present)
            batches[-1] += unit
            present.update(names[i] for i in unit)
    return batches
