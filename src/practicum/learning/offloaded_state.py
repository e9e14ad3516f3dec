"""The optimizer's state, which only its step needs, in host memory or on disk the rest of the time."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from practicum.errors import PracticumError
from practicum.models.offloaded_weights import OffloadTarget, return_memory, tensor_bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of the state: here, or so many bytes of the file; `like` is what it looked like."""

    like: Tensor
    host: Tensor | None = None
    place: int = 0


class OffloadedState:
    """Moves the state of an optimizer away and back, bit by bit the same; numbers of no dimension stay."""

    def __init__(self, optimizer: torch.optim.Optimizer, where: OffloadTarget, device: torch.device) -> None:
        self._optimizer, self._where, self._device = optimizer, where, device
        self._held: dict[tuple[Tensor, str], _Held] = {}
        self._file: BinaryIO | None = None

    def take(self) -> None:
        """Move the state away."""
        if self._where == "disk" and self._file is None:
            self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
        place = 0
        for p, state in self._optimizer.state.items():
            for name, value in list(state.items()):
                if not isinstance(value, Tensor) or value.ndim == 0:
                    continue
                local = value.to_local() if isinstance(value, DTensor) else value
                like = value.to("meta")
                if self._file is None:
                    held = _Held(like, host=local.to("cpu"))
                else:
                    held = _Held(like, place=place)
                    place += self._write(place, local)
                self._held[p, name] = held
                del state[name], value, local
        return_memory(self._device)

    def restore(self) -> None:
        """Put the state back."""
        for (p, name), held in self._held.items():
            local = held.like.to_local() if isinstance(held.like, DTensor) else held.like
            if held.host is not None:
                back = held.host.to(self._device)
            else:
                back = self._read(held.place, torch.empty_like(local, device="cpu")).to(self._device)
            if isinstance(held.like, DTensor):
                like = held.like
                back = DTensor.from_local(
                    back, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
                )
            self._optimizer.state[p][name] = back
        self._held.clear()

    def _write(self, place: int, tensor: Tensor) -> int:
        assert self._file is not None
        there = tensor.to("cpu").contiguous()
        try:
            self._file.seek(place)
            self._file.write(tensor_bytes(there))
            self._file.flush()
        except OSError as error:
            raise PracticumError(
                f"the optimizer's state can't be offloaded to {tempfile.gettempdir()}: {error}\n"
                "  → set TMPDIR to a folder with room, or train.offload to none"
            ) from error
        return there.nbytes

    def _read(self, place: int, into: Tensor) -> Tensor:
        file: Any = self._file
        file.seek(place)
        if file.readinto(tensor_bytes(into)) != into.nbytes:
            raise PracticumError("the temporary file with the optimizer's state was cut short")
        return into
