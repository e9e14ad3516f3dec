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
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from practicum.compat.torch import make_empty
from practicum.devices import collective_backends
from practicum.errors import PracticumError

T = TypeVar("T")

_PAUSE_S = 0.3
"""Between the last barrier and the end of the group: without it gloo aborts the process now and then."""


class Root(nn.Module):
    """Runs work on a model inside a forward pass, whose hooks gather the outermost weights. A part that is
    trained with the model has its own root around it, for FSDP2 wants one dtype in each."""

    def __init__(self, part: nn.Module, inner: Root | None = None) -> None:
        super().__init__()
        self.part, self.inner = part, inner

    def forward(self, work: Callable[[], T]) -> T:
        return work() if self.inner is None else self.inner(work)

    def let_go(self) -> None:
        cast(FSDPModule, self).reshard()
        if self.inner is not None:
            self.inner.let_go()


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process among the data-parallel ranks. Every method but the properties is called on all ranks."""

    rank: int
    world: int
    device: str = "cpu"

    @classmethod
    def join(
        cls, rank: int, world: int, address: str, port: int, timeout_s: float, device: str = "cpu"
    ) -> Parallel:
        """Connect to all ranks at rank 0's address. `timeout_s` limits this and each collective."""
        try:
            dist.init_process_group(
                collective_backends(device),
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
        return cls(rank, world, device)

    def gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks in order. Use it for small objects."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def largest(self, number: int) -> int:
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def shard(self, model: PreTrainedModel, layers: Sequence[nn.Module], *more: nn.Module) -> Root:
        """Shard a model in place: each layer by itself, all else together.

        Ranks whose model has no weights yet (on the meta device) receive those of rank 0. Parameters become
        DTensors. Gradients are sums over ranks, zeros where a rank had none.
        """
        mesh = init_device_mesh(self.device, (self.world,))
        weights = self._describe_weights(model)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        root = Root(model)
        fully_shard(root, mesh=mesh, reshard_after_forward=False)
        for part in more:
            root = Root(part.to(self.device), root)
            fully_shard(root, mesh=mesh, reshard_after_forward=False)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # Token weights are already divided by global counts. gloo knows plain sums only.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        cast(FSDPModule, root).set_reduce_scatter_unused_params(True)
        if weights is not None:
            self._send_weights(model, weights)
        return root

    def _describe_weights(self, model: PreTrainedModel) -> dict[str, Tensor] | None:
        """Return the whole weights and buffers by name, on rank 0, or None if every rank has them. Models
        without weights take dtypes and generation config of rank 0's."""
        if not any(self.gather(model.device.type == "meta")):
            return None
        mine = dict(named_states(model))
        facts = {name: x.dtype for name, x in mine.items()}, getattr(model, "generation_config", None)
        dtypes, generation_config = self.gather(facts)[0]
        if generation_config is not None:
            model.generation_config = generation_config
        for name, x in mine.items():
            x.data = x.data.to(dtypes[name])
        return {name: x.detach() for name, x in mine.items()}

    @torch.no_grad()
    def _send_weights(self, model: nn.Module, whole_weights: dict[str, Tensor]) -> None:
        """Broadcast rank 0's weights and buffers. Each rank keeps its shards."""
        if self.rank:
            make_empty(model, self.device)
        for name, x in named_states(model):
            source = whole_weights[name]
            tensor = torch.empty_like(source, device=self.device) if self.rank else source.to(self.device)
            dist.broadcast(tensor, 0)
            if isinstance(x, DTensor):
                shard = distribute_tensor(tensor, x.device_mesh, x.placements, src_data_rank=None)
                x.to_local().copy_(shard.to_local())
            else:
                x.copy_(tensor)

    def close(self) -> None:
        if not dist.is_initialized():
            return
        try:
            dist.barrier()
            time.sleep(_PAUSE_S)
        except RuntimeError:
            pass  # another rank has died
        dist.destroy_process_group()


def free_port(address: str = "127.0.0.1") -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def named_states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. If ranks have shards of it, all of them must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(model: nn.Module, only: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters and saved buffers, tied ones once, or the parameters of these names. Every
    rank must go through them."""
    for name, parameter in model.named_parameters():
        if only is None or name in only:
            yield name, whole(parameter.detach())
    saved = model.state_dict().keys() if only is None else ()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
