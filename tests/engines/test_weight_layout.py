"""Weights that go to a vLLM process by a layout arrive where its loaders would have put them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from practicum.engines.shared_memory import SharedBlock, SharedReader
from practicum.engines.vllm.copy_recorder import CopyRecorder
from practicum.engines.vllm.gpu_weights import choose_way
from practicum.engines.vllm.weight_delivery import LayoutWriter, SlotBucket
from practicum.engines.vllm.weight_layout import LearntParameter, WeightLayout, plan_layout
from practicum.errors import EngineError

HIDDEN, WORKERS = 8, 2


class Layer(nn.Module):
    """A worker's part of a layer, as vLLM has it: joined queries and keys, a norm, a padded embedding."""

    qk: Tensor
    out: Tensor
    norm: Tensor
    embed: Tensor

    def __init__(self) -> None:
        super().__init__()
        shapes = {"qk": (HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN // WORKERS), "norm": (HIDDEN,)}
        shapes["embed"] = (HIDDEN // WORKERS + 1, HIDDEN)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))

    def take(self, worker: int, weights: Iterator[tuple[str, Tensor]]) -> None:
        """As vLLM's loaders do."""
        half = HIDDEN // WORKERS
        mine = slice(worker * half, (worker + 1) * half)
        for name, weight in weights:
            layer, _, what = name.partition(".")
            assert layer == "layer"
            if what in ("q", "k"):
                rows = self.qk.data[half:] if what == "k" else self.qk.data[:half]
                rows.copy_(weight[mine])
            elif what == "out":
                self.out.data.copy_(weight[:, mine])
            elif what == "norm":
                self.norm.data.copy_(weight)
            elif what == "embed":
                self.embed[:half].data.copy_(weight[mine])
                self.embed[half:].data.fill_(0)


def weights(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    square = (HIDDEN, HIDDEN)
    shapes = {"embed": square, "q": square, "k": square, "out": square, "norm": (HIDDEN,), "tied": (2,)}
    return {f"layer.{name}": torch.randn(shape, generator=g) for name, shape in shapes.items()}


def learn(most: int) -> tuple[WeightLayout, list[Layer]]:
    """The layout of a load by the loaders, and the workers after it."""
    layers = [Layer() for _ in range(WORKERS)]
    learnt, shapes = [], {}
    for worker, layer in enumerate(layers):
        root = nn.ModuleDict({"layer": layer})
        recorder = CopyRecorder(root)
        with recorder:
            layer.take(worker, recorder.watched(iter(weights().items())))
        copies = recorder.copies()
        assert copies is not None
        learnt.append(
            [
                LearntParameter(module, name, "float32", shape, name in ("qk", "out"), made)
                for (module, name), (made, shape) in copies.items()
            ]
        )
        shapes = recorder.shapes
    return plan_layout(shapes, learnt, most), layers


def place(layout: WeightLayout, reader: SharedReader, bucket: SlotBucket, layers: Sequence[Layer]) -> None:
    """What workers do with a bucket."""
    for layer, arrivals in zip(layers, layout.buckets[bucket.number].arrivals, strict=True):
        for one in arrivals:
            tensor = reader.tensor(bucket.place, one.dtype, one.shape, bucket.offset + one.offset)
            parameter = layer.get_parameter(one.name).data
            if one.target is None:
                parameter.copy_(tensor)
            else:
                one.target.of(parameter).copy_(tensor)


def send(layout: WeightLayout, given: Sequence[tuple[str, Tensor]], layers: Sequence[Layer]) -> None:
    """All weights, with buckets read as late as can be."""
    block, reader = SharedBlock(), SharedReader()
    waiting: list[tuple[int, SlotBucket]] = []

    def free_slot() -> int | None:
        if not waiting:
            return None
        slot, bucket = waiting.pop(0)
        place(layout, reader, bucket, layers)
        return slot

    writer = LayoutWriter(layout, block, free_slot)
    try:
        for name, tensor in given:
            waiting.extend(writer.put(name, tensor))
        waiting.extend(writer.rest())
        while free_slot() is not None:
            pass
    finally:
        block.close()


@settings(max_examples=15, deadline=None)
@given(
    most=st.sampled_from([1, 64, 200, 300, 10_000]),
    order=st.permutations(range(6)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_in_any_order_and_any_buckets_all_arrives(most: int, order: Sequence[int], dtype: torch.dtype):
    layout, layers = learn(most)
    assert max(bucket.size for bucket in layout.buckets) <= max(most, 4 * HIDDEN * HIDDEN)
    new = weights(1)
    named = [(name, tensor.to(dtype)) for name, tensor in new.items()]
    send(layout, [named[n] for n in order], layers)
    for worker, layer in enumerate(layers):
        expected = Layer()
        expected.take(worker, iter(new.items()))
        for name, parameter in expected.named_parameters():
            assert torch.equal(layer.get_parameter(name), parameter), name


def cut(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor[:-1] if name == "layer.k" else tensor)]


def lose(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [] if name == "layer.k" else [(name, tensor)]


def repeat(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor)] * 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, r"at layer\.k \[7, 8\]: expected \[8, 8\]"),
        (lose, r"1 layers did not get all .*: layer \(\d+ of \d+ numbers came\)"),
        (repeat, r"layer\.embed \[8, 8\]: it came twice"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    spoil: Callable[[str, Tensor], list[tuple[str, Tensor]]], words: str
):
    layout, layers = learn(200)
    given = [pair for named in weights(1).items() for pair in spoil(*named)]
    with pytest.raises(EngineError, match=words):
        send(layout, given, layers)


@pytest.mark.parametrize("how", ["scaled", "added", "in part", "from another"])
def test_what_is_no_plain_copy_is_not_learnt(how: str):
    layer = Layer()
    recorder = CopyRecorder(nn.ModuleDict({"layer": layer}))
    with recorder:
        for _, weight in recorder.watched([("layer.norm", torch.ones(HIDDEN))]):
            if how == "scaled":
                layer.norm.data.copy_(2 * weight)
            elif how == "added":
                layer.norm.data.copy_(weight)
                layer.norm.data.add_(1)
            elif how == "in part":
                layer.norm.data[1:].copy_(weight[1:])
            else:
                layer.norm.data.copy_(torch.ones(HIDDEN))
    assert recorder.copies() is None


@pytest.mark.parametrize(
    ("learner", "engine", "way"),
    [
        (None, (), "memory"),
        (None, ("a",), "memory"),
        ("a", (), "memory"),
        ("a", ("a",), "ipc"),
        ("a", ("b",), "nccl"),
        ("a", ("a", "b"), "nccl"),
    ],
)
def test_weights_on_a_gpu_do_not_pass_through_the_host(
    learner: str | None, engine: tuple[str, ...], way: str
):
    assert choose_way(learner, engine) == way
