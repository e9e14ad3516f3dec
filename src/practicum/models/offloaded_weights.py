"""Weights of an engine: taken by name, sent in buckets, or offloaded while the engine sleeps."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import torch
from torch import Tensor

from practicum.devices import empty_cache
from practicum.errors import EngineError
from practicum.models.lora import is_adapter

if TYPE_CHECKING:  # vLLM's process says in its own words what keeps transformers from being imported
    from transformers import PreTrainedModel


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and buffers by name, tied ones under each. With an adapter, only its own."""
    tensors = model.state_dict(keep_vars=True)
    return {name: x for name, x in tensors.items() if is_adapter(name)} or tensors


def distinct_tensors(model: PreTrainedModel) -> list[Tensor]:
    """Return every parameter and buffer of the model once."""
    return list({id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def take_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into the model by name. Skip tensors that the model already uses.

    A model with an adapter takes the adapter's alone: its base is what was loaded.
    Names and shapes are checked before anything is changed. A tied weight may come under any of its names.
    """
    new_tensors, own = dict(weights), named_tensors(model)
    _check(new_tensors, own)
    with torch.no_grad():
        for name, tensor in new_tensors.items():
            if not _is_same_memory(tensor, own[name]):
                own[name].copy_(tensor)


def in_buckets(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield weights that travel together: of at most this many bytes, or one that is larger."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in weights:
        if bucket and filled + tensor.nbytes > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _check(new: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raise an EngineError if names, shapes or tied weights do not fit."""
    covered = {id(own[name]) for name in new if name in own}
    shapes = [
        f"{name} is {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        for name, tensor in new.items()
        if name in own and tensor.shape != own[name].shape
    ]
    faults = {
        "missing": [name for name, tensor in own.items() if id(tensor) not in covered],
        "unknown": [name for name in new if name not in own],
        "of another shape": shapes,
    }
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in faults.items()
        if names
    ]
    if problems:
        raise EngineError(
            f"weights do not fit the engine's model: {'; '.join(problems)}; nothing was loaded. "
            "Engine and learner must hold the same architecture"
        )
    first: dict[int, str] = {}
    for name, tensor in new.items():
        other = first.setdefault(id(own[name]), name)
        if not _is_same_memory(tensor, new[other]) and not torch.equal(tensor, new[other]):
            raise EngineError(
                f"{name} and {other} are one tied weight of the engine's model but came with different "
                "values; nothing was loaded"
            )


OffloadTarget = Literal["host", "disk"]
"""Where a sleeping model's weights may be: in the host's memory, or in a file of TMPDIR."""


class OffloadedWeights:
    """A model's parameters, offloaded."""

    def __init__(self, model: PreTrainedModel, where: OffloadTarget) -> None:
        self._parameters = list(model.parameters())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._device = self._parameters[0].device
        self._file: BinaryIO | None = None
        self.move(where)

    def move(self, where: OffloadTarget) -> None:
        """Move the weights there. Weights on disk can only move back to the device."""
        if self._file is not None:
            return
        if where == "host":
            for parameter in self._parameters:
                parameter.data = parameter.data.cpu()
            return
        file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
        try:
            for parameter in self._parameters:
                file.write(tensor_bytes(parameter.data.cpu().contiguous()))
            file.flush()
        except OSError as error:
            file.close()
            raise EngineError(
                f"weights can't be offloaded to {tempfile.gettempdir()}: {error}; set TMPDIR to a folder "
                "with room, or raise runtime.teachers_gb"
            ) from error
        self._file = file  # it stays open until `restore`
        for parameter in self._parameters:  # only now that all of it is on disk
            parameter.data = parameter.data.new_empty(0, device="cpu")

    def restore(self) -> None:
        """Restore the parameters, bit for bit."""
        if self._file is None:
            for parameter in self._parameters:
                parameter.data = parameter.data.to(self._device)
            return
        self._file.seek(0)
        for parameter, shape in zip(self._parameters, self._shapes, strict=True):
            read_back = parameter.data.new_empty(shape)
            count = self._file.readinto(tensor_bytes(read_back))  # pyright: ignore[reportAttributeAccessIssue]
            if count != read_back.nbytes:
                raise EngineError("the temporary file with a sleeping engine's weights was cut short")
            parameter.data = read_back.to(self._device)
        self.drop()

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def return_memory(device: torch.device) -> None:
    """Return freed memory that the allocator keeps to the system."""
    if device.type != "cpu":
        empty_cache(device)
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
