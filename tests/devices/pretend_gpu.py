"""A pretend GPU on a machine without one: its tensors hold CPU tensors and refuse to mix with them.

Numbers are the CPU's, bit for bit, so a run on it must equal the same run on the CPU; a tensor that was left
on the CPU is an error, as on a real device. It can't show kernels, streams, pinned copies, NCCL or memory.
It rests on a private function of torch that makes a device type in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"


class DeviceMemory:
    """Bytes of all tensors on the device; more than the `limit` can't be had."""

    def __init__(self) -> None:
        self.limit, self.peak = 2**40, 0
        self._holders: dict[int, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def take(self, place: int, size: int) -> None:
        """One more tensor in this piece of memory."""
        self._holders[place] = self._holders.get(place, 0) + 1
        if self._holders[place] == 1:
            self._used += size
            self.peak = max(self.peak, self._used)

    def give_back(self, place: int, size: int) -> None:
        """One fewer."""
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self._used -= size


MEMORY = DeviceMemory()


class _Allocated:
    """A tensor's part of the device's memory, for as long as the tensor lives."""

    def __init__(self, held: Tensor) -> None:
        self._storage = held.untyped_storage()  # so that nothing else gets its place
        self._part = self._storage.data_ptr(), self._storage.nbytes()
        MEMORY.take(*self._part)
        if MEMORY.used > MEMORY.limit:
            raise torch.OutOfMemoryError(f"the pretend device has {MEMORY.limit:,} bytes")

    def __del__(self) -> None:
        MEMORY.give_back(*self._part)


class PretendTensor(Tensor):
    """Says that it is on the pretend device, and holds a CPU tensor."""

    held: Tensor
    memory: _Allocated

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held, made.memory = held, _Allocated(held)
        return made

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"pretend({self.held!r})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention:  # the CPU's kernel, where torch would take a plain one
            return _Attention.apply(kwargs, *args)
        if function in _OF_HELD:
            return function(args[0].held, *args[1:], **kwargs)
        if function is Tensor.numpy:
            raise TypeError("a tensor on the pretend device has no numpy array: move it to the CPU first")
        with torch._C.DisableTorchFunctionSubclass():  # results keep the class that they have
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = op._schema.name
        if name == "aten::_to_copy":
            target = kwargs.pop("device", None)
            kwargs.pop("pin_memory", None)
            out = op(_held(args[0]), **kwargs)
            return out if target is not None and target.type == "cpu" else PretendTensor(out)
        if name == "aten::copy_":
            op(*map(_held, args), **kwargs)
            return args[0]
        if name == "aten::_local_scalar_dense":
            return op(_held(args[0]))
        # As on a GPU, numbers and indices may come from the CPU.
        mixed = (args[0], args[2:]) if name in _INDEXED else (args, kwargs)
        for x in tree_leaves(mixed):
            if isinstance(x, Tensor) and not isinstance(x, PretendTensor) and x.dim() > 0:
                raise RuntimeError(f"{name}: one tensor is on the pretend device and one on the CPU")
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if name == "aten::histc":  # a GPU counts whole numbers too
            return PretendTensor(op(args[0].held.float(), *args[1:]).to(args[0].dtype))
        out = op(*tree_map(_held, args), **tree_map(_held, kwargs))
        given = {id(x.held): x for x in tree_leaves((args, kwargs)) if isinstance(x, PretendTensor)}
        if any(x.shape != x.held.shape for x in given.values()):
            raise NotImplementedError(f"{name} changed the shape of a tensor of the pretend device")
        return tree_map(lambda x: _wrapped(x, given), out)


_OF_HELD = (Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage)
"""What is asked of the tensor inside."""
_INDEXED = tuple(f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_"))
"""With the indices as their second argument."""


def _held(x: Any) -> Any:
    return x.held if isinstance(x, PretendTensor) else x


def _wrapped(x: Any, given: dict[int, PretendTensor]) -> Any:
    """A result of the CPU's; one that an operation wrote into is the tensor it was given."""
    if not isinstance(x, Tensor):
        return x
    return given[id(x)] if id(x) in given else PretendTensor(x)


class _Attention(torch.autograd.Function):
    """Attention with the CPU's kernels, forward and backward."""

    @staticmethod
    def forward(ctx: Any, kwargs: dict[str, Any], *args: Any) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and not isinstance(x, PretendTensor):
                raise RuntimeError("attention: one tensor is on the pretend device and one on the CPU")
        needed = [isinstance(x, Tensor) and x.requires_grad for x in args]
        with torch.enable_grad():
            inputs = [
                _held(x).detach().requires_grad_(need) if isinstance(x, Tensor) else x
                for x, need in zip(args, needed, strict=True)
            ]
            ctx.out = scaled_dot_product_attention(*inputs, **{name: _held(x) for name, x in kwargs.items()})
        ctx.inputs = [x for x, need in zip(inputs, needed, strict=True) if need]
        ctx.needed = needed
        return PretendTensor(ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = iter(torch.autograd.grad(ctx.out, ctx.inputs, _held(grads[0]), retain_graph=True))
        return None, *(PretendTensor(next(found)) if need else None for need in ctx.needed)


def _data() -> property:
    """`.data` of parameters, which may be given a tensor of another device."""
    plain: Any = Tensor.data

    def assign(self: Tensor, new: Tensor) -> None:
        if isinstance(self, PretendTensor) or isinstance(new, PretendTensor):
            torch.utils.swap_tensors(self, nn.Parameter(new.detach(), self.requires_grad))
        else:
            plain.__set__(self, new)

    return property(plain.__get__, assign)


class _Hook(torch._C._acc.PrivateUse1Hooks):  # pyright: ignore[reportAttributeAccessIssue]
    """What torch asks of a device type; `present` is whether the machine has one just now."""

    present = False

    def is_available(self) -> bool:
        return self.present

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Stream:
    """All work is done at once."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def synchronize(self) -> None:
        pass


class _Module:
    """`torch.pretend`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _hook().present

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(_hook().present)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_stream(self) -> _Stream:
        return _Stream()

    def stream(self, stream: _Stream) -> nullcontext:
        return nullcontext()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY.limit - MEMORY.used, MEMORY.limit

    def max_memory_allocated(self, device: Any = None) -> int:
        return MEMORY.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        MEMORY.peak = MEMORY.used

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def _hook() -> _Hook:
    return _Hook()


@cache
def _registered() -> torch.library.Library:
    """Register the device type, once in a process: torch can't take it back."""
    _setup_privateuseone_for_python_backend(NAME, _Module(), _hook())
    aten = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return PretendTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
        return PretendTensor(torch.empty_strided(size, stride, dtype=dtype))

    def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, **_: Any) -> Tensor:
        return PretendTensor(torch.arange(start, end, step, dtype=dtype))

    def arange_to(end: Any, dtype: Any = None, **_: Any) -> Tensor:
        return arange(0, end, dtype=dtype)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        _held(target).copy_(_held(source))
        return target

    aten.impl("arange", arange_to, "PrivateUse1")
    aten.impl("arange.start", arange, "PrivateUse1")
    aten.impl("arange.start_step", arange, "PrivateUse1")

    def item(x: Tensor) -> Any:
        return _held(x).item()

    def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
        return PretendTensor(torch.ops.aten.silu_backward(_held(grad), _held(x)))

    aten.impl("silu_backward", silu_backward, "PrivateUse1")
    aten.impl("_local_scalar_dense", item, "PrivateUse1")
    aten.impl("_copy_from", copy_from, "PrivateUse1")
    aten.impl("empty.memory_format", empty, "PrivateUse1")
    aten.impl("empty_strided", empty_strided, "PrivateUse1")
    return aten


@contextmanager
def pretend_gpu() -> Iterator[torch.device]:
    """The machine has the pretend GPU: `device: auto` finds it."""
    _registered()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `.data = …` can't change a tensor's class
    nn.Parameter.data = PretendTensor.data = _data()  # pyright: ignore[reportAttributeAccessIssue]
    _hook().present = True
    try:
        yield torch.device(NAME, 0)
    finally:
        _hook().present = False
        del nn.Parameter.data, PretendTensor.data
        torch.__future__.set_swap_module_params_on_conversion(before)
