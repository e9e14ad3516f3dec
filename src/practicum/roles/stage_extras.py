"""What rows of vision and MoE models carry beside their tokens, as the learner takes it."""

from __future__ import annotations

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stage import Columns
from practicum.learning.packing import RowExtras
from practicum.models.images import Images


def images_of(columns: Columns, batch: BatchRef) -> list[Images | None]:
    """The pictures of each row, if the model has eyes."""
    if "multi_modal_inputs" not in columns:
        return [None] * len(batch)
    return [Images.from_inputs(inputs) for inputs in columns.objects("multi_modal_inputs")]


def extras_of(columns: Columns, batch: BatchRef) -> RowExtras | None:
    """What the stage read of them; None if tokens are all there is."""
    names = ("position_ids", "multi_modal_inputs", "routed_experts")
    if not any(name in columns for name in names):
        return None
    return RowExtras(
        position_ids=columns.ragged("position_ids") if "position_ids" in columns else None,
        images=images_of(columns, batch) if "multi_modal_inputs" in columns else None,
        routed_experts=columns.ragged("routed_experts") if "routed_experts" in columns else None,
    )
