"""Several learner processes that act as one: weights are sharded over them, gradients are summed.

FSDP2 over torch.distributed. Ranks run the same passes in the same order.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from practicum.devices import collective_backends
from practicum.errors import EngineError, PracticumError

T = TypeVar("T")

_PAUSE_S = 0.3
"""Between the last barrier and the end of the group: without it gloo aborts the process now and then."""
_SETTINGS = ("set_reduce_scatter_unused_params", "set_force_sum_reduction_for_comms")


class Root(nn.Module):
    """A model and what else is trained with it. Work on them runs inside its forward pass.

    Whoever enters by a part of the model would pass by the hooks that gather the outermost weights. What is
    trained with it has a root of its own around the model's: FSDP2 wants one number type in each.
    """

    def __init__(self, part: nn.Module, inner: Root | None = None) -> None:
        super().__init__()
        self.part, self.inner = part, inner

    def forward(self, work: Callable[[], T]) -> T:
        return work() if self.inner is None else self.inner(work)

    def let_go(self) -> None:
        """Free the gathered weights."""
        cast(FSDPModule, self).reshard()
        if self.inner is not None:
            self.inner.let_go()


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process among the data-parallel ranks. Every method but the properties is called on all ranks."""

    rank: int
    world: int

    @classmethod
    def join(
        cls, rank: int, world: int, address: str, port: int, timeout_s: float, device: str = "cpu"
    ) -> Parallel:
        """Meet the other ranks at rank 0's address; waits for them and for each collective `timeout_s`."""
        backends = collective_backends(device)
        lacking = [name for name in _SETTINGS if not hasattr(FSDPModule, name)]
        if lacking:
            raise EngineError(
                f"data-parallel ranks need FSDP2's {' and '.join(lacking)}, which torch {torch.__version__} "
                "lacks: install torch 2.13 or later"
            )
        try:
            dist.init_process_group(
                backends,
                init_method=f"tcp://{address}:{port}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
        except dist.DistError as error:
            raise PracticumError(
                f"learner rank {rank} did not meet the other {world - 1} at {address}:{port} within "
                f"{timeout_s:g} s: {str(error).splitlines()[0]}"
            ) from error
        return cls(rank, world)

    def gather(self, mine: T) -> list[T]:
        """What each rank has, in their order; for small things."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def shard(
        self, model: nn.Module, layers: Sequence[nn.Module], *more: nn.Module, device: torch.device
    ) -> Root:
        """Shard a model (the same on all ranks) in place: each layer by itself, all else together.

        Its parameters become DTensors. Gradients are sums over ranks, zeros where a rank had none.
        """
        mesh = init_device_mesh(device.type, (self.world,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        root = Root(model)
        fully_shard(root, mesh=mesh, reshard_after_forward=False)
        for part in more:
            root = Root(part, root)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
        for module in root.modules():
            if not isinstance(module, FSDPModule):
                continue
            sharded = cast(FSDPModule, module)
            # Token weights are already divided by global counts. gloo knows plain sums only.
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)
        cast(FSDPModule, root).set_reduce_scatter_unused_params(True)
        return root

    def close(self) -> None:
        """Leave the group; the other ranks do so too, or are gone."""
        if not dist.is_initialized():
            return
        try:
            dist.barrier()
            time.sleep(_PAUSE_S)
        except RuntimeError:
            pass  # a rank is gone: nobody is left to wait for
        dist.destroy_process_group()


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this machine on which nobody listens just now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def run_in(root: Root | None, work: Callable[[], T]) -> T:
    """Do work on a model, sharded or not; without gradients its weights are let go at once."""
    if root is None:
        return work()
    result = root(work)
    if not torch.is_grad_enabled():
        # Kept for a backward pass, they would be stale after the next optimizer step.
        root.let_go()
    return result


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it if ranks have shards: then every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(model: nn.Module, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters (or those of these names) one after the other, tied ones once; every rank must
    go through them."""
    for name, parameter in model.named_parameters():
        if only is None or name in only:
            yield name, whole(parameter.detach())


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks have shards of the model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
