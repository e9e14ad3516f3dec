"""Pictures on their way from a prompt to the model: cut into patches, never decoded again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from practicum.dataplane.ragged import Columns
from practicum.errors import DataError

PIXELS, GRID = "pixel_values", "image_grid_thw"
"""Names of the two tensors among a model's inputs, and in the field multi_modal_inputs."""


@dataclass(frozen=True, eq=False, slots=True)
class Images:
    """Pictures of one prompt, as the model's image processor cut them, in the order of their tokens."""

    pixels: Tensor
    """[patches, width], float32 on the CPU."""
    grid: Tensor
    """[images, 3], int64: time, height and width of each picture in patches."""
    _digest: list[bytes] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixels", self.pixels.to("cpu", torch.float32).contiguous())
        object.__setattr__(self, "grid", self.grid.to("cpu", torch.int64).contiguous())
        patches = int(self.grid.prod(1).sum())
        if not patches or self.pixels.dim() != 2 or self.pixels.shape[0] != patches:
            raise DataError(
                f"pictures of {patches} patches (grid {self.grid.tolist()}) came with pixels of shape "
                f"{list(self.pixels.shape)}, expected one row per patch"
            )

    @property
    def digest(self) -> bytes:
        """Equal for equal pictures; computed once."""
        if not self._digest:
            made = hashlib.blake2b(str(self.grid.tolist()).encode(), digest_size=16)
            made.update(self.pixels.numpy().data.cast("B"))
            self._digest.append(made.digest())
        return self._digest[0]

    def as_inputs(self) -> dict[str, Tensor]:
        """What the field multi_modal_inputs holds of them, under the names of the model's own inputs."""
        return {PIXELS: self.pixels, GRID: self.grid}

    @staticmethod
    def from_inputs(inputs: Mapping[str, Any]) -> Images | None:
        """The pictures of a row's multi_modal_inputs; None if it is empty."""
        return Images(inputs[PIXELS], inputs[GRID]) if inputs else None


def images_of(columns: Columns) -> list[Images | None]:
    """The pictures of each row, from the field multi_modal_inputs."""
    return [Images.from_inputs(inputs) for inputs in columns.objects("multi_modal_inputs")]
