"""Where the learner's weights lie in vLLM's parameters: learnt by the first load, used by all later ones.

vLLM joins weights (q, k and v are one matrix) and splits them over its workers. Its loaders find that out
for each weight of each load, in Python. Once it is known, the learner writes each part of a weight to where
vLLM has it, and a worker takes whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from practicum.engines.shared_memory import aligned


class Region(NamedTuple):
    """A part of a tensor, in numbers from its first one."""

    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], start: int = 0) -> Region:
        """All of a contiguous tensor."""
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return cls(start, tuple(shape), tuple(strides))

    @property
    def numel(self) -> int:
        return prod(self.size)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a contiguous tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.start)

    def rows(self, most: int) -> Iterator[Region]:
        """The same in pieces along the first axis, of at most so many numbers if a row has no more."""
        if not self.size or self.numel <= most:
            yield self
            return
        step = max(1, most // max(1, prod(self.size[1:])))
        for row in range(0, self.size[0], step):
            size = (min(step, self.size[0] - row), *self.size[1:])
            yield Region(self.start + row * self.stride[0], size, self.stride)


class LearntCopy(NamedTuple):
    """A part of a weight, and the part of a parameter that it was copied to."""

    weight: str
    source: Region
    target: Region


class LearntParameter(NamedTuple):
    """A parameter of a worker, and what was copied to it."""

    module: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    packed: bool
    """Whether vLLM computes with a packed copy, which is made of all of it; else it is copied in parts."""
    copies: tuple[LearntCopy, ...]


class Piece(NamedTuple):
    """A part of a weight, and where it is written in a bucket."""

    bucket: int
    layer: str
    source: Region
    dtype: str
    offset: int
    target: Region


class Arrival(NamedTuple):
    """A tensor in a bucket that a worker takes: into a part of a parameter, or to be packed."""

    module: str
    name: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    target: Region | None


class LayoutBucket(NamedTuple):
    """Bytes of a bucket, and what each worker takes from it."""

    size: int
    arrivals: tuple[tuple[Arrival, ...], ...]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights with their shapes, the pieces that each is written in, and the buckets that hold them."""

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, tuple[Piece, ...]]
    buckets: tuple[LayoutBucket, ...]
    numbers: Mapping[str, int]
    """Of each of vLLM's layers: how many come from weights."""

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.size for bucket in self.buckets)


@dataclass(slots=True)
class _Unit:
    """What stays together in a bucket: a parameter that is packed, or a part of another one."""

    worker: int
    parameter: LearntParameter
    copies: list[LearntCopy]
    shape: tuple[int, ...]
    target: Region | None = None
    last: int = field(init=False, default=0)

    @property
    def nbytes(self) -> int:
        return aligned(prod(self.shape) * getattr(torch, self.parameter.dtype).itemsize)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], workers: Sequence[Sequence[LearntParameter]], most: int
) -> WeightLayout:
    """Buckets of at most `most` bytes, or of one parameter that is larger, in the order of the weights.

    `shapes` are those of all weights in the order in which they came; `workers` what each of them learnt.
    """
    order = {name: number for number, name in enumerate(shapes)}
    units = [
        unit
        for worker, learnt in enumerate(workers)
        for parameter in learnt
        for unit in _units(worker, parameter, most)
    ]
    for unit in units:
        unit.last = max(order[copy.weight] for copy in unit.copies)
    units.sort(key=lambda unit: (unit.last, unit.worker))
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    buckets: list[LayoutBucket] = []
    for number, held in enumerate(_bucketed(units, most)):
        arrivals: list[list[Arrival]] = [[] for _ in workers]
        offset = 0
        for unit in held:
            p = unit.parameter
            arrivals[unit.worker].append(Arrival(p.module, p.name, p.dtype, offset, unit.shape, unit.target))
            for copy in unit.copies:
                to = copy.target if unit.target is None else Region.whole(unit.shape)
                pieces[copy.weight].append(Piece(number, p.module, copy.source, p.dtype, offset, to))
            offset += unit.nbytes
        buckets.append(LayoutBucket(offset, tuple(map(tuple, arrivals))))
    numbers: dict[str, int] = {}
    for unit in units:
        came = sum(copy.source.numel for copy in unit.copies)
        numbers[unit.parameter.module] = numbers.get(unit.parameter.module, 0) + came
    return WeightLayout(dict(shapes), {name: tuple(x) for name, x in pieces.items()}, tuple(buckets), numbers)


def _units(worker: int, parameter: LearntParameter, most: int) -> Iterator[_Unit]:
    if parameter.packed:
        yield _Unit(worker, parameter, list(parameter.copies), parameter.shape)
        return
    count = max(1, most // getattr(torch, parameter.dtype).itemsize)
    for copy in parameter.copies:
        for source, target in zip(copy.source.rows(count), copy.target.rows(count), strict=True):
            cut = LearntCopy(copy.weight, source, target)
            yield _Unit(worker, parameter, [cut], target.size, target)


def _bucketed(units: Sequence[_Unit], most: int) -> Iterator[list[_Unit]]:
    held: list[_Unit] = []
    for unit in units:
        if held and sum(one.nbytes for one in held) + unit.nbytes > most:
            yield held
            held = []
        held.append(unit)
    if held:
        yield held
