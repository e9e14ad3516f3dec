"""What rows of mixture-of-experts and vision models carry beside their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.models.images import Images


@dataclass(frozen=True, slots=True)
class RowExtras:
    """What some models need of each row beside its tokens."""

    position_ids: Ragged | None = None
    """Rows [P + R, D]: a position on each axis; vision models."""
    images: Sequence[Images | None] | None = None
    """The pictures of each row's prompt, in the order of their tokens; vision models."""
    routed_experts: Ragged | None = None
    """Rows [P + R, L, E]: the experts that each token takes, in place of those its router would choose."""

    def select(self, rows: Sequence[int]) -> RowExtras:
        """Those rows in that order."""
        positions, images, experts = self.position_ids, self.images, self.routed_experts
        return RowExtras(
            position_ids=None if positions is None else positions.select(rows),
            images=None if images is None else [images[i] for i in rows],
            routed_experts=None if experts is None else experts.select(rows),
        )

    def own_routing(self) -> RowExtras:
        """The same without recorded experts: for a model that routes by itself."""
        return replace(self, routed_experts=None)

    def check(self, tokens: Sequence[int]) -> None:
        """A DataError if this is not of rows with these numbers of tokens, prompt and response together."""
        for name in ("position_ids", "routed_experts"):
            column: Ragged | None = getattr(self, name)
            if column is not None:
                _check_lengths(name, column.lengths, tokens)
        if self.images is None:
            return
        if len(self.images) != len(tokens):
            raise DataError(f"{len(tokens)} rows came with images of {len(self.images)}")
        shown = [i for i, images in enumerate(self.images) if images is not None]
        if shown and self.position_ids is None:
            raise DataError(f"row {shown[0]} has images but no position_ids, which its tokens need")


def _check_lengths(name: str, lengths: Sequence[int], tokens: Sequence[int]) -> None:
    if len(lengths) != len(tokens):
        raise DataError(f"{len(tokens)} rows came with {name} of {len(lengths)}")
    for i, (found, wanted) in enumerate(zip(lengths, tokens, strict=True)):
        if found != wanted:
            raise DataError(
                f"{name} of row {i} is of {found} tokens; its prompt and response have {wanted} together"
            )
