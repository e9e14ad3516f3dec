"""Pack rows without padding: assign rows to forward passes, and lay them out.

Rows share what they have in common at their beginnings, prompt or response: equal in tokens, and in recorded
experts if these are replayed. Prompts with images are shared as a whole. A packed input is a tree of
segments (`models/token_tree.py`) of all rows without their last tokens, which predict nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from practicum.cpu.row_parts import PartGrads, RowParts
from practicum.dataplane.ragged import Columns, Ragged
from practicum.errors import DataError
from practicum.models.packed_attention import PackedLayout
from practicum.models.token_tree import TokenRows, TokenTree
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
    row_tokens: int = 0
    """Input tokens of all rows, had they nothing in common."""
    images: tuple[Images, ...] = ()
    """Images of the distinct prompts that have any, in the order of their tokens; on the CPU."""
    image_prompts: tuple[Tensor, ...] = ()
    """The places of those prompts' tokens among the input tokens; on the CPU."""
    experts_N: Tensor | None = None
    """Experts to replay for each input token [N, L, E], or None if the routers choose."""
    parts: RowParts | None = None
    """The parts that the input tokens belong to, if their gradients are kept apart; on the CPU."""

    def to(self, device: torch.device) -> Packed:
        if self.ids_N.device == device:
            return self
        names = ("ids_N", "positions_N", "layout", "gather_M", "target_M", "experts_N")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{name: x.to(device) for name, x in parts.items() if x is not None})


class RowSpans:
    """The rows of a batch, ready to be cut into micro-batches. Rows of different `parts` share no tokens."""

    grads: PartGrads | None = None
    """Where micro-batches are to add the gradients of parts."""

    def __init__(
        self,
        prompt_ids: Ragged,
        response_ids: Ragged,
        extras: RowExtras | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        if len(prompt_ids) != len(response_ids):
            raise DataError(f"{len(prompt_ids)} prompts came with {len(response_ids)} responses")
        if 0 in prompt_ids.lengths:
            raise DataError(f"row {prompt_ids.lengths.index(0)} has an empty prompt")
        self.prompts, self.responses = prompt_ids.rows, response_ids.rows
        self.prompt_lengths, self.lengths = prompt_ids.lengths, response_ids.lengths
        if extras is not None:
            extras.check([p + r for p, r in zip(self.prompt_lengths, self.lengths, strict=True)])
        self.extras, self.parts = extras, parts or [0] * len(self.lengths)
        self.starts = np.cumsum([0, *self.lengths])
        pairs = zip(self.prompts, self.responses, strict=True)
        inputs = [torch.cat(pair)[:-1].numpy() for pair in pairs]
        fixed = experts = None
        kinds = [part.to_bytes(4, "big") for part in self.parts]
        if extras is not None and extras.images is not None:
            shown = [b"" if images is None else images.digest for images in extras.images]
            fixed = [p if kind else 0 for p, kind in zip(self.prompt_lengths, shown, strict=True)]
            kinds = [part + kind for part, kind in zip(kinds, shown, strict=True)]
        if extras is not None and extras.routed_experts is not None:
            experts = [x[:-1].numpy() for x in extras.routed_experts.rows]
        self.tokens = TokenRows(inputs, kinds, fixed, experts)

    def microbatches(
        self,
        token_budget: int,
        *,
        rows: Sequence[int] | None = None,
        sampled_M: Tensor | None = None,
        sessions: Sequence[int] | None = None,
    ) -> Iterator[Packed]:
        """Yield micro-batches of these rows (all if None), to predict the sampled tokens (all if None). Rows
        with nothing to predict are in none of them. See `plan_microbatches` for `sessions`."""
        chosen = range(len(self.lengths)) if rows is None else rows
        if sampled_M is not None:
            sampled = np.concatenate([[0], sampled_M.numpy().cumsum()])
            chosen = [i for i in chosen if sampled[self.starts[i + 1]] > sampled[self.starts[i]]]
        parts = plan_microbatches(
            self.tokens,
            self.prompt_lengths,
            [i for i in chosen if self.lengths[i]],
            token_budget,
            sessions,
        )
        for part in parts:
            packed = self.pack(part)
            if sampled_M is not None:
                wanted_M = sampled_M[packed.column_M]
                names = ("gather_M", "target_M", "column_M")
                packed = replace(packed, **{name: getattr(packed, name)[wanted_M] for name in names})
            yield packed

    def pack(self, rows: Sequence[int]) -> Packed:
        """Lay out these rows. Each must have a response token."""
        tree, rows = self.tokens.tree(rows), sorted(rows, key=self.parts.__getitem__)
        spans = zip(tree.starts, (self.tokens.lengths[i] for i in tree.order), strict=True)
        ids = [torch.cat([self.prompts[i], self.responses[i]]) for i in tree.order]
        # A response token is predicted by the one before it.
        gather = [tree.paths[i][self.prompt_lengths[i] - 1 :] for i in rows]
        column = [np.arange(self.starts[i], self.starts[i + 1]) for i in rows]
        packed = Packed(
            ids_N=_new_tokens(ids, tree.starts),
            positions_N=torch.from_numpy(np.concatenate([np.arange(*span) for span in spans])),
            layout=PackedLayout.of_segments(tree.segments),
            gather_M=torch.from_numpy(np.concatenate(gather)),
            target_M=torch.cat([self.responses[i] for i in rows]),
            column_M=torch.from_numpy(np.concatenate(column)),
            row_tokens=sum(self.tokens.lengths[i] for i in rows),
        )
        if self.grads is not None:
            new = [self.tokens.lengths[i] - start for i, start in zip(tree.order, tree.starts, strict=True)]
            part_N = torch.tensor([self.parts[i] for i in tree.order]).repeat_interleave(torch.tensor(new))
            packed = replace(packed, parts=RowParts(part_N, self.grads))
        return packed if self.extras is None else self._add_extras(packed, tree, self.extras)

    def _add_extras(self, packed: Packed, tree: TokenTree, extras: RowExtras) -> Packed:
        """Lay out the rows' extras as their tokens are."""
        if extras.position_ids is not None:
            rows = [extras.position_ids[i] for i in tree.order]
            packed = replace(packed, positions_N=_new_tokens(rows, tree.starts))
        if extras.routed_experts is not None:
            rows = [extras.routed_experts[i] for i in tree.order]
            packed = replace(packed, experts_N=_new_tokens(rows, tree.starts))
        images: list[Images] = []
        prompts: list[Tensor] = []
        for i, start in zip(tree.order, tree.starts, strict=True):
            length, shown = self.prompt_lengths[i], extras.images[i] if extras.images is not None else None
            if shown is not None and start < length:
                images.append(shown)
                prompts.append(torch.from_numpy(tree.paths[i][:length]))
        return replace(packed, images=tuple(images), image_prompts=tuple(prompts))


def _new_tokens(rows: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Join the tokens that each row adds: from its start on, without the last."""
    return torch.cat([row[start:-1] for row, start in zip(rows, starts, strict=True)])


def plan_microbatches(
    tokens: TokenRows,
    prompt_lengths: Sequence[int],
    rows: Sequence[int],
    token_budget: int,
    sessions: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the rows of each micro-batch, at most `token_budget` packed tokens each.

    Rows whose prompts begin with the same prompt stay together where they fit. Rows of one session always do,
    if `sessions` is given. A row or session longer than the budget goes alone.
    """
    units: dict[int, list[int]] = {}
    for i in rows:
        units.setdefault(i if sessions is None else sessions[i], []).append(i)

    def longest(unit: list[int]) -> int:
        return max(tokens.lengths[i] for i in unit)

    roots = tokens.roots(rows, prompt_lengths)
    bundles: dict[Hashable, list[list[int]]] = {}
    for unit in units.values():
        bundles.setdefault(roots[unit[0]], []).append(unit)
    batches: list[list[int]] = []
    present: list[int] = []
    room = 0
    # Longest first: rows of a micro-batch are alike, and what does not fit in memory fails first.
    for bundle in sorted(bundles.values(), key=lambda b: (-max(map(longest, b)), b[0][0])):
        # Those that begin alike beside each other.
        bundle.sort(key=lambda unit: tokens.rank[unit[0]])
        if room < tokens.new_tokens([i for unit in bundle for i in unit], list(present)) <= token_budget:
            room = -1  # not even a unit that costs nothing goes into this micro-batch
        for unit in bundle:
            if not batches or tokens.new_tokens(unit, list(present)) > room:
                batches.append([])
                present, room = [], token_budget
            room -= tokens.new_tokens(unit, present)
            batches[-1] += unit
    return batches
