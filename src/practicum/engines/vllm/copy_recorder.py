"""What vLLM's loaders copy where: seen while they load, kept where it is nothing but copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from practicum.engines.vllm.weight_layout import LearntCopy, Region

Key = tuple[str, str]
"""A module's name, and that of its parameter."""
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


class CopyRecorder(TorchDispatchMode):
    """Watches the parameters that a model has when this is made; weights are loaded by `watched`.

    vLLM runs each loader on a parameter without memory first, to count what it copies: that is what is seen.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._targets: dict[int, tuple[Key, Tensor]] = {}  # holds them, so that no other has their address
        for module_name, module in model.named_modules():
            tensors = {**module._parameters, **module._buffers}
            for name, tensor in tensors.items():
                if tensor is not None:
                    self._targets[_address(tensor)] = (module_name, name), tensor
        self._current: tuple[str, Tensor] | None = None
        self._copies: dict[Key, dict[LearntCopy, None]] = {}
        self._zeros: dict[Key, int] = {}
        self._spoilt: set[Key] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of all weights that came."""

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes weights on to the loaders."""
        for name, tensor in weights:
            self._current, self.shapes[name] = (name, tensor), tuple(tensor.shape)
            yield name, tensor
        self._current = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            target = self._targets.get(_address(args[0]))
            if target is not None:
                self._record(target[0], func, args)
        return func(*args, **(kwargs or {}))

    @property
    def touched(self) -> set[Key]:
        """Parameters to which anything was done."""
        return {*self._copies, *self._zeros, *self._spoilt}

    def copies(self) -> dict[Key, tuple[tuple[LearntCopy, ...], tuple[int, ...]]] | None:
        """What was copied to each parameter, and its shape; None if anything else was done to one of them."""
        if self._spoilt or any(key not in self._copies for key in self._zeros):
            return None
        shapes = {key: tuple(tensor.shape) for key, tensor in self._targets.values()}
        for key, copies in self._copies.items():
            if not _covers(copies, shapes[key], self._zeros.get(key, 0)):
                return None
        return {key: (tuple(copies), shapes[key]) for key, copies in self._copies.items()}

    def _record(self, key: Key, func: Any, args: tuple[Any, ...]) -> None:
        to = args[0]
        if func in _FILLS and (func is _FILLS[-1] or not bool(args[1])):
            self._zeros[key] = max(self._zeros.get(key, 0), to.numel())
            return
        if func is not torch.ops.aten.copy_.default or not isinstance(args[1], Tensor):
            self._spoilt.add(key)
            return
        source, (name, weight) = args[1], self._current or ("", to)
        if _address(source) == _address(to):
            return  # put back to where it was
        if _address(source) != _address(weight) or source.shape != to.shape or not weight.is_contiguous():
            self._spoilt.add(key)
            return
        start = int(source.storage_offset() - weight.storage_offset())
        copy = LearntCopy(
            name,
            Region(start, tuple(source.shape), source.stride()),
            Region(to.storage_offset(), tuple(to.shape), to.stride()),
        )
        self._copies.setdefault(key, {})[copy] = None  # a loader may run twice: for its count, and for good


def _covers(copies: Iterable[LearntCopy], shape: tuple[int, ...], zeros: int) -> bool:
    """Whether copies fill a contiguous tensor but for so many zeros, and none overlaps another."""
    seen = torch.zeros(shape, dtype=torch.bool)
    for copy in copies:
        copy.target.of(seen).fill_(True)
    came = sum(copy.target.numel for copy in copies)
    return int(seen.sum()) == came == seen.numel() - zeros


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
