"""Models that see: where the pictures of a prompt are, which positions its tokens have, what they become.

A picture stands in a prompt as a run of image tokens, one for each merged patch. The first image tokens of a
sequence are its pictures'; later ones, which a model may sample, are plain tokens. Positions have three axes
(time, height, width): those of text continue from the largest + 1 on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.errors import EngineError
from practicum.models.images import Images
from practicum.recipe.derived import VISION_FAMILIES

AXES = 3


def is_vision(config: Any) -> bool:
    """Whether a model of this config takes pictures."""
    return config.model_type in VISION_FAMILIES


def image_token_id(config: Any) -> int:
    """The token that stands for a piece of a picture."""
    return config.image_token_id


def probe_images(config: Any) -> Images:
    """A picture of four tokens, always the same, to try a model with."""
    side, width = 2 * _merge(config), _patch_width(config)
    pixels = torch.linspace(-1, 1, side * side * width).reshape(-1, width).sin()
    return Images(pixels, torch.tensor([[1, side, side]]))


def picture_spans(config: Any, ids: Sequence[int], images: Images | None) -> list[tuple[int, int]]:
    """Where each picture's tokens begin and end in a sequence; an EngineError if they are not there."""
    if images is None:
        return []
    if images.pixels.shape[1] != _patch_width(config):
        raise EngineError(
            f"pictures have patches of {images.pixels.shape[1]} numbers, the model's have "
            f"{_patch_width(config)}: use the image processor of this model"
        )
    spans: list[tuple[int, int]] = []
    token, end, counts = image_token_id(config), 0, _tokens(config, images)
    for count in counts:
        start = next((i for i in range(end, len(ids)) if ids[i] == token), len(ids))
        end = start + count
        if end > len(ids) or any(i != token for i in ids[start:end]):
            found = sum(i == token for i in ids)
            raise EngineError(
                f"a sequence of {len(ids)} tokens has {found} image tokens ({token}), which do not fit "
                f"pictures of {counts} tokens: each picture needs a run of its own, in order"
            )
        spans.append((start, end))
    return spans


def picture_tokens(config: Any, ids: Sequence[int], images: Images | None) -> Tensor:
    """Which tokens of a sequence stand for pieces of its pictures [len(ids)]."""
    picture_N = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in picture_spans(config, ids, images):
        picture_N[start:end] = True
    return picture_N


def sequence_positions(config: Any, ids: Sequence[int], images: Images | None) -> Tensor:
    """Positions [len(ids), 3] of a whole sequence, prompt and response, on the CPU."""
    spans = picture_spans(config, ids, images)
    if images is None or not spans:
        return torch.arange(len(ids)).unsqueeze(1).expand(-1, AXES).contiguous()
    steps_N = torch.ones(len(ids), dtype=torch.int64)  # how far each token's successor is from it
    offsets = [_offsets(config, grid) for grid in images.grid.tolist()]
    for (start, end), (_, height, width) in zip(spans, images.grid.tolist(), strict=True):
        steps_N[start:end] = 0
        steps_N[end - 1] = max(height, width) // _merge(config)
    positions_ND = (steps_N.cumsum(0) - steps_N).unsqueeze(1).repeat(1, AXES)
    for (start, end), offset in zip(spans, offsets, strict=True):
        positions_ND[start:end] += offset
    return positions_ND


def embed(
    model: PreTrainedModel,
    ids_N: Tensor,
    positions_N: Tensor,
    images: Sequence[Images],
    picture_N: Tensor | None = None,
) -> Tensor:
    """Embeddings [N, hidden] of packed tokens, pictures in place of their tokens (`picture_N`).

    Unset, these are the first image tokens. With positions of three axes it is checked that they fit.
    """
    base: Any = model.base_model
    embedded_N = base.get_input_embeddings()(ids_N)
    if not images:
        return embedded_N
    counts = [count for each in images for count in _tokens(model.config, each)]
    if picture_N is None:
        picture_N = ids_N == image_token_id(model.config)
        picture_N &= picture_N.cumsum(0) <= sum(counts)
    place_K = picture_N.nonzero().squeeze(1)
    if len(place_K) != sum(counts) or not _fit(model.config, positions_N[place_K], images):
        raise EngineError(
            f"{len(place_K)} image tokens do not fit {len(counts)} pictures of {sum(counts)} tokens, or "
            "their positions are not those of these pictures"
        )
    # One by one, so that what a picture becomes does not depend on those beside it.
    features = torch.cat(
        [
            part
            for each in images
            for pixels, grid in zip(each.pixels.split(each.grid.prod(1).tolist()), each.grid, strict=True)
            for part in base.get_image_features(
                pixels.to(ids_N.device), grid.unsqueeze(0).to(ids_N.device)
            ).pooler_output
        ]
    )
    return embedded_N.index_copy(0, place_K, features.to(embedded_N.dtype))


def _merge(config: Any) -> int:
    return config.vision_config.spatial_merge_size


def _patch_width(config: Any) -> int:
    vision = config.vision_config
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def _tokens(config: Any, images: Images) -> list[int]:
    """How many tokens each picture has."""
    return (images.grid.prod(1) // _merge(config) ** 2).tolist()


def _offsets(config: Any, grid: Sequence[int]) -> Tensor:
    """Positions [tokens, 3] of a picture's tokens, seen from where it begins."""
    time, height, width = grid[0], grid[1] // _merge(config), grid[2] // _merge(config)
    return torch.cartesian_prod(torch.arange(time), torch.arange(height), torch.arange(width))


def _fit(config: Any, positions_K: Tensor, images: Sequence[Images]) -> bool:
    """Whether these are positions of the pictures' tokens; yes for positions of one axis."""
    if positions_K.dim() == 1:
        return True
    offsets = [_offsets(config, grid) for each in images for grid in each.grid.tolist()]
    ends = torch.tensor([0, *map(len, offsets)]).cumsum(0).tolist()
    start_K = torch.cat([positions_K[a : a + 1].expand(b - a, -1) for a, b in pairwise(ends)])
    return torch.equal(positions_K, start_K + torch.cat(offsets).to(start_K.device))
