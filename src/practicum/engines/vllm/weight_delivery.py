"""Weights on their way to a vLLM process: bucket by bucket through memory that all its processes map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from practicum.engines.shared_memory import MemoryPlace, SharedBlock
from practicum.engines.vllm.weight_layout import Piece, Region, WeightLayout
from practicum.errors import EngineError

BUCKET_BYTES = 64 * 2**20
SLOT_BYTES, SLOTS = 16 * 2**20, 4
"""Buckets by a layout are smaller, and some are written while others are read."""
_NAMED = 3


class SlotBucket(NamedTuple):
    """A bucket of the layout, at an offset of the memory."""

    place: MemoryPlace
    number: int
    offset: int


class LayoutWriter:
    """Writes weights to where vLLM has them, in whatever order they come, and gives buckets that are whole.

    `free_slot` waits for a bucket to be read and gives its slot; None if none is on its way. Weights for
    which there is no slot are kept until there is one.
    """

    def __init__(self, layout: WeightLayout, block: SharedBlock, free_slot: Callable[[], int | None]) -> None:
        self._layout, self._block, self._free_slot = layout, block, free_slot
        self.slot_bytes = max(SLOT_BYTES, layout.largest)
        self.slots = max(2, min(SLOTS, SLOTS * SLOT_BYTES // self.slot_bytes))
        block.reserve(self.slots * self.slot_bytes)
        self._free = list(range(self.slots))
        self._slot_of: dict[int, int] = {}
        self._left = Counter(piece.bucket for some in layout.pieces.values() for piece in some)
        self._kept: dict[int, list[tuple[Piece, Tensor]]] = {}
        self._came: Counter[str] = Counter()
        self._seen: set[str] = set()

    def put(self, name: str, tensor: Tensor) -> Iterator[tuple[int, SlotBucket]]:
        """Take a weight; gives the buckets that are whole now, with their slots."""
        shape = self._layout.shapes[name]
        if tuple(tensor.shape) != shape or name in self._seen:
            why = "it came twice" if name in self._seen else f"expected {list(shape)}"
            raise EngineError(f"weights do not fit vLLM's model at {name} {list(tensor.shape)}: {why}")
        self._seen.add(name)
        plain = tensor.detach().contiguous()
        for piece in self._layout.pieces[name]:
            part = piece.source.of(plain)
            slot = self._slot(piece.bucket)
            if slot is None:
                self._kept.setdefault(piece.bucket, []).append((piece, part.clone()))
            else:
                for kept in (*self._kept.pop(piece.bucket, ()), (piece, part)):
                    yield from self._write(kept[0], slot, kept[1])

    def rest(self) -> Iterator[tuple[int, SlotBucket]]:
        """After the last weight: what was kept. An error names layers that did not get all of theirs."""
        missing = [layer for layer, count in self._layout.numbers.items() if self._came_of(layer) < count]
        if missing:
            raise EngineError(missing_weights([f"{x} ({self._told(x)} numbers came)" for x in missing]))
        while self._kept:
            bucket, parts = next(iter(self._kept.items()))
            del self._kept[bucket]
            slot = self._slot(bucket)
            assert slot is not None, "all buckets that have slots are whole"
            for piece, part in parts:
                yield from self._write(piece, slot, part)

    def _came_of(self, layer: str) -> int:
        kept = (piece for some in self._kept.values() for piece, _ in some)
        return self._came[layer] + sum(piece.source.numel for piece in kept if piece.layer == layer)

    def _told(self, layer: str) -> str:
        return f"{self._came_of(layer)} of {self._layout.numbers[layer]}"

    def _slot(self, bucket: int) -> int | None:
        if bucket not in self._slot_of:
            slot = self._free.pop() if self._free else self._free_slot()
            if slot is None:
                return None
            self._slot_of[bucket] = slot
        return self._slot_of[bucket]

    def _write(self, piece: Piece, slot: int, part: Tensor) -> Iterator[tuple[int, SlotBucket]]:
        at = slot * self.slot_bytes
        _write(self._block, at + piece.offset, piece.dtype, piece.target, part)
        self._came[piece.layer] += piece.source.numel
        self._left[piece.bucket] -= 1
        if not self._left[piece.bucket]:
            yield slot, SlotBucket(self._block.place, piece.bucket, at)


def _write(block: SharedBlock, offset: int, dtype: str, target: Region, tensor: Tensor) -> None:
    """Copy a tensor to a region of numbers of this type, which begin at an offset."""
    if target.numel:
        extent = 1 + sum((n - 1) * step for n, step in zip(target.size, target.stride, strict=True))
        target.of(block.view(dtype, (target.start + extent,), offset)).copy_(tensor.detach())


def missing_weights(layers: list[str]) -> str:
    """That these layers did not get all of their weights."""
    named = ", ".join([*layers[:_NAMED], *["…"][: len(layers) > _NAMED]])
    return (
        f"{len(layers)} layers did not get all of their weights: {named}. Engine and learner must hold "
        "the same architecture"
    )
