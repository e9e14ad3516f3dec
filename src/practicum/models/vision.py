"""Models that see: images, where they are in a prompt, which positions tokens have, what they become.

An image stands in a prompt as a run of image tokens, one for each merged patch. The first image tokens of a
sequence are its images'. Later ones, which a model may sample, are plain tokens. Positions have three axes
(time, height, width): those of text continue from the largest + 1 on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.dataplane.ragged import Columns
from practicum.errors import DataError, EngineError
from practicum.recipe.derived import VISION_FAMILIES

AXES = 3
PIXELS, GRID = "pixel_values", "image_grid_thw"
"""Names of the two tensors among a model's inputs, and in the field multi_modal_inputs."""


@dataclass(frozen=True, eq=False, slots=True)
class Images:
    """Images of one prompt, as the model's image processor cut them, in the order of their tokens."""

    pixels: Tensor
    """[patches, width], float32 on the CPU."""
    grid: Tensor
    """[images, 3], int64: time, height and width of each image in patches."""
    _digest: list[bytes] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixels", self.pixels.to("cpu", torch.float32).contiguous())
        object.__setattr__(self, "grid", self.grid.to("cpu", torch.int64).contiguous())
        patches = int(self.grid.prod(1).sum())
        if not patches or self.pixels.dim() != 2 or self.pixels.shape[0] != patches:
            raise DataError(
                f"images of {patches} patches (grid {self.grid.tolist()}) came with pixels of shape "
                f"{list(self.pixels.shape)}, expected one row per patch"
            )

    @property
    def digest(self) -> bytes:
        """A digest that is equal for equal images, computed once."""
        if not self._digest:
            made = hashlib.blake2b(str(self.grid.tolist()).encode(), digest_size=16)
            made.update(self.pixels.numpy().data.cast("B"))
            self._digest.append(made.digest())
        return self._digest[0]

    def as_inputs(self) -> dict[str, Tensor]:
        """Return them as the field multi_modal_inputs holds them."""
        return {PIXELS: self.pixels, GRID: self.grid}

    @staticmethod
    def from_inputs(inputs: Mapping[str, Any]) -> Images | None:
        return Images(inputs[PIXELS], inputs[GRID]) if inputs else None


def images_of(columns: Columns) -> list[Images | None]:
    """Return the images of each row."""
    return [Images.from_inputs(inputs) for inputs in columns.objects("multi_modal_inputs")]


def is_vision(config: Any) -> bool:
    """Return True if a model of this config takes images."""
    return config.model_type in VISION_FAMILIES


def probe_images(config: Any) -> Images:
    """Return an image of four tokens, always the same, to try a model with."""
    side, width = 2 * _merge(config), _patch_width(config)
    pixels = torch.linspace(-1, 1, side * side * width).reshape(-1, width).sin()
    return Images(pixels, torch.tensor([[1, side, side]]))


def picture_spans(config: Any, ids: Sequence[int], images: Images | None) -> list[tuple[int, int]]:
    """Return where each image's tokens begin and end in a sequence, or raise an EngineError."""
    if images is None:
        return []
    if images.pixels.shape[1] != _patch_width(config):
        raise EngineError(
            f"images have patches of {images.pixels.shape[1]} numbers, the model's have "
            f"{_patch_width(config)}: use the image processor of this model"
        )
    spans: list[tuple[int, int]] = []
    token, end, counts = config.image_token_id, 0, _tokens(config, images)
    for count in counts:
        start = next((i for i in range(end, len(ids)) if ids[i] == token), len(ids))
        end = start + count
        if end > len(ids) or any(i != token for i in ids[start:end]):
            found = sum(i == token for i in ids)
            raise EngineError(
                f"a sequence of {len(ids)} tokens has {found} image tokens ({token}), which do not fit "
                f"images of {counts} tokens: each image needs its own run, in order"
            )
        spans.append((start, end))
    return spans


def picture_tokens(config: Any, ids: Sequence[int], images: Images | None) -> Tensor:
    """Return a mask of the tokens that stand for parts of images [len(ids)]."""
    picture_N = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in picture_spans(config, ids, images):
        picture_N[start:end] = True
    return picture_N


def sequence_positions(config: Any, ids: Sequence[int], images: Images | None) -> Tensor:
    """Return positions [len(ids), 3] of a whole sequence, prompt and response, on the CPU."""
    spans = picture_spans(config, ids, images)
    steps_N = torch.ones(len(ids), dtype=torch.int64)  # how far each token's successor is from it
    grids = [] if images is None else images.grid.tolist()
    for (start, end), (_, height, width) in zip(spans, grids, strict=True):
        steps_N[start:end] = 0
        steps_N[end - 1] = max(height, width) // _merge(config)
    positions_ND = (steps_N.cumsum(0) - steps_N).unsqueeze(1).repeat(1, AXES)
    for (start, end), grid in zip(spans, grids, strict=True):
        positions_ND[start:end] += _offsets(config, grid)
    return positions_ND


def embed(
    model: PreTrainedModel,
    ids_N: Tensor,
    positions_N: Tensor,
    images: Sequence[Images],
    picture_N: Tensor | None = None,
) -> Tensor:
    """Return embeddings [N, hidden] of packed tokens, images in place of their tokens (`picture_N`). Unset,
    these are the first image tokens. With positions of three axes it is checked that they fit."""
    base: Any = model.base_model
    embedded_N = base.get_input_embeddings()(ids_N)
    if not images:
        return embedded_N
    config: Any = model.config
    counts = [count for each in images for count in _tokens(config, each)]
    if picture_N is None:
        is_image_N: Tensor = ids_N == config.image_token_id
        picture_N = is_image_N & (is_image_N.cumsum(0) <= sum(counts))
    place_K = picture_N.nonzero().squeeze(1)
    if len(place_K) != sum(counts) or not _fit(config, positions_N[place_K], images):
        raise EngineError(
            f"{len(place_K)} image tokens do not fit {len(counts)} images of {sum(counts)} tokens, or "
            "their positions are not those of these images"
        )
    features: list[Tensor] = []
    for each in images:
        # One by one, so that an image's features do not depend on those beside it.
        for pixels, grid in zip(each.pixels.split(each.grid.prod(1).tolist()), each.grid, strict=True):
            inputs = pixels.to(ids_N.device), grid.unsqueeze(0).to(ids_N.device)
            features += base.get_image_features(*inputs).pooler_output
    return embedded_N.index_copy(0, place_K, torch.cat(features).to(embedded_N.dtype))


def _merge(config: Any) -> int:
    return config.vision_config.spatial_merge_size


def _patch_width(config: Any) -> int:
    vision = config.vision_config
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def _tokens(config: Any, images: Images) -> list[int]:
    """Return the number of tokens of each image."""
    return (images.grid.prod(1) // _merge(config) ** 2).tolist()


def _offsets(config: Any, grid: Sequence[int]) -> Tensor:
    """Return positions [tokens, 3] of an image's tokens, relative to where it begins."""
    time, height, width = grid[0], grid[1] // _merge(config), grid[2] // _merge(config)
    return torch.cartesian_prod(torch.arange(time), torch.arange(height), torch.arange(width))


def _fit(config: Any, positions_K: Tensor, images: Sequence[Images]) -> bool:
    """Return True if these are positions of the images' tokens, or have one axis."""
    if positions_K.dim() == 1:
        return True
    offsets = [_offsets(config, grid) for each in images for grid in each.grid.tolist()]
    ends = torch.tensor([0, *map(len, offsets)]).cumsum(0).tolist()
    start_K = torch.cat([positions_K[a : a + 1].expand(b - a, -1) for a, b in pairwise(ends)])
    return torch.equal(positions_K, start_K + torch.cat(offsets).to(start_K.device))
