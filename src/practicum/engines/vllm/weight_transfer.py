"""The receiving side of weights in each of vLLM's workers, as a backend of vLLM's own weight transfer.

Weights in the host's memory come in buckets: those of the first load go through vLLM's loaders, those of
later ones are where vLLM has them, and are packed or copied. Weights on a GPU come by vLLM's own backends
(`gpu_weights`): that was not tried. In the processes of vLLM only: importing this imports vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.weight_transfer import WeightTransferConfig  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    UnquantizedEmbeddingMethod,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from practicum.engines.shared_memory import MemoryBucket, SharedReader
from practicum.engines.vllm.copy_recorder import CopyRecorder
from practicum.engines.vllm.reload_weights import LoaderLoad, process_attention, repack_head
from practicum.engines.vllm.vllm_messages import TRANSFER
from practicum.engines.vllm.weight_delivery import SlotBucket
from practicum.engines.vllm.weight_layout import Arrival, LearntParameter
from practicum.errors import EngineError
from practicum.models.offloaded_weights import return_memory

_PACKERS = 2
"""Threads that pack parameters during a load: the engine's, and one of the learner's, which waits."""


@dataclass
class TransferInit(WeightTransferInitInfo):
    """What one of vLLM's own backends needs to begin: its name, and its own arguments."""

    way: str
    given: dict[str, Any] = field(default_factory=dict)


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """Some weights: a bucket (`memory`), or what one of vLLM's own backends is to receive."""

    way: str
    given: MemoryBucket | SlotBucket | dict[str, Any]


class PracticumTransfer(WeightTransferEngine[TransferInit, TransferUpdate]):
    """Takes weights of one load after the other; `arrivals` of the layout are given after the first one."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.arrivals: Sequence[Sequence[Arrival]] = ()
        """What this worker takes from each bucket of the layout."""
        self._reader = SharedReader()
        self._load: LoaderLoad | None = None
        self._failure: EngineError | None = None
        self._records = current_platform.is_cpu()
        self._head: _HeadPacking | None = None
        self._taken: set[int] = set()
        """Buckets of the layout that came in this load."""
        self._others: dict[str, Any] = {}

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        other = self._other(init_info.way)
        other.init_transfer_engine(other.parse_init_info(init_info.given))

    def start_weight_update(self) -> None:
        self.give_up()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        try:
            self._receive(update_info)
        except Exception:
            self.give_up()
            raise

    def _receive(self, update_info: TransferUpdate) -> None:
        given = update_info.given
        if isinstance(given, SlotBucket):
            self._take_slot(given)
        elif isinstance(given, MemoryBucket):
            self._loaders().take(self._copies(given))
        else:
            other = self._other(update_info.way)
            other.model = _ThroughLoaders(self._loaders())
            other.receive_weights(other.parse_update_info(given))

    def finish_weight_update(self) -> None:
        """Use the weights; what keeps them from being whole is raised by `learnt`, for vLLM would not let
        another load begin."""
        if self._load is None:
            self._finish_layout()
            return
        try:
            self._load.finish()
        except EngineError as error:
            self.give_up()
            self._failure = error
        return_memory(self.device)  # layers were made anew, and their old ones are in the heap

    def _finish_layout(self) -> None:
        came, self._taken = len(self._taken), set()
        if came != len(self.arrivals) or not came:
            self._failure = EngineError(f"{came} of {len(self.arrivals)} buckets of weights came")
        process_attention(self.model, self.model_config.dtype)
        if self._head is None or not self._head.done():
            repack_head(self.model)
        self._head = None

    def learnt(self) -> tuple[Mapping[str, tuple[int, ...]], list[LearntParameter]] | None:
        """Of a load that vLLM's loaders did: shapes of the weights, and where they went; None if that is no
        plain copy, and always on GPUs."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        load, self._load = self._load, None
        if load is None or load.recorder is None:
            return None
        parameters = learnt_parameters(self.model, load.recorder)
        self._records = parameters is not None  # else it is no use to look again
        return None if parameters is None else (load.recorder.shapes, parameters)

    def check_unused(self, bucket: MemoryBucket) -> None:
        """An error if these weights, which the first load did not bring, are for other parameters than those
        that the layout fills: tied ones may come under several names."""
        if self._head is not None:
            self._head.done()  # layers lose their tensors for a moment
        filled = {id(self._parameter(one.module, one.name)) for some in self.arrivals for one in some}
        held = {
            (module_name, name): id(parameter)
            for module_name, module in self.model.named_modules()
            for name, parameter in module._parameters.items()
        }
        load = LoaderLoad(self.model, self.model_config, records=True)
        try:
            load.take(self._copies(bucket))
        finally:
            load.give_up()
        assert load.recorder is not None
        if any(held.get(key) not in filled for key in load.recorder.touched):
            names = ", ".join(entry.name for entry in bucket.entries)
            raise EngineError(f"weights came in addition to those of the first load: {names}")

    def _copies(self, bucket: MemoryBucket) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a bucket as a copy: vLLM keeps them until it has all of a layer."""
        return ((name, tensor.clone()) for name, tensor in self._reader.tensors(bucket))

    def _parameter(self, module: str, name: str) -> nn.Parameter:
        return self.model.get_submodule(module)._parameters[name]

    def give_up(self) -> None:
        """Forget a load that was not finished."""
        self._failure = None
        self._taken.clear()
        if self._load is not None:
            self._load.give_up()
            self._load = None
        if self._head is not None:
            self._head.done()
            self._head = None

    def shutdown(self) -> None:
        for other in self._others.values():
            other.shutdown()

    def _loaders(self) -> LoaderLoad:
        if self._load is None:
            self._load = LoaderLoad(self.model, self.model_config, records=self._records)
        return self._load

    def _other(self, way: str) -> Any:
        """One of vLLM's own backends."""
        if way not in self._others:
            config = WeightTransferConfig(backend=way)
            self._others[way] = WeightTransferEngineFactory.create_engine(
                config, self.vllm_config, self.device, self.model
            )
        return self._others[way]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        threads = max(1, min(_PACKERS, len(os.sched_getaffinity(0)) // self.parallel_config.world_size))
        return ThreadPoolExecutor(threads, "practicum-pack")

    def _take_slot(self, bucket: SlotBucket) -> None:
        arrivals = self.arrivals[bucket.number]
        for _ in self._pool.map(partial(self._place, bucket), arrivals):
            pass
        self._taken.add(bucket.number)
        if self._head is None:
            self._head = _HeadPacking(self.model, self.arrivals)
        self._head.came(arrivals, self._pool)

    def _place(self, bucket: SlotBucket, arrival: Arrival) -> None:
        offset = bucket.offset + arrival.offset
        tensor = self._reader.tensor(bucket.place, arrival.dtype, arrival.shape, offset)
        module: Any = self.model.get_submodule(arrival.module)
        parameter = module._parameters[arrival.name]
        if arrival.target is not None:
            arrival.target.of(parameter.data).copy_(tensor)
            return
        module.cpu_linear = None  # first: the new packed copy takes the memory of the old one
        module.register_parameter(arrival.name, nn.Parameter(tensor, requires_grad=False))
        module.quant_method.process_weights_after_loading(module)
        if module._parameters[arrival.name].numel():
            raise RuntimeError(f"vLLM did not pack {arrival.module}, and packed it before")
        module.register_parameter(arrival.name, parameter)


class _HeadPacking:
    """Packs the output head as soon as its weights are there: it is large, and often the first to come."""

    def __init__(self, model: Any, arrivals: Sequence[Sequence[Arrival]]) -> None:
        self._model = model
        weight = getattr(getattr(model, "lm_head", None), "weight", None)
        self._parameters = {
            (one.module, one.name)
            for bucket in arrivals
            for one in bucket
            if one.target is not None and model.get_submodule(one.module)._parameters[one.name] is weight
        }
        self._left = sum(self._is_head(one) for bucket in arrivals for one in bucket)
        self._packed: Future[None] | None = None

    def came(self, arrivals: Sequence[Arrival], pool: ThreadPoolExecutor) -> None:
        """These are where they belong."""
        here = sum(map(self._is_head, arrivals))
        self._left -= here
        if here and not self._left:
            self._packed = pool.submit(repack_head, self._model)

    def done(self) -> bool:
        """Wait for it; whether it was begun at all."""
        if self._packed is not None:
            self._packed.result()
        return self._packed is not None

    def _is_head(self, one: Arrival) -> bool:
        return (one.module, one.name) in self._parameters


class _ThroughLoaders:
    """Stands for the model in vLLM's own backends, so that their weights are checked as all others."""

    def __init__(self, load: LoaderLoad) -> None:
        self.load_weights = load.take


def learnt_parameters(model: nn.Module, recorder: CopyRecorder) -> list[LearntParameter] | None:
    """Where weights went, if all that vLLM did was to copy them, and to pack whole matrices."""
    copies = recorder.copies()
    if copies is None:
        return None
    found = []
    for (module_name, name), (made, shape) in copies.items():
        module: Any = model.get_submodule(module_name)
        parameter, method = module._parameters.get(name), getattr(module, "quant_method", None)
        if parameter is None or type(method) not in (
            type(None),
            UnquantizedLinearMethod,
            UnquantizedEmbeddingMethod,
        ):
            return None
        packed = name == "weight" and not parameter.numel() and "cpu_linear" in vars(module)
        count = sum(copy.target.numel for copy in made)
        if packed and count != torch.Size(shape).numel():
            return None
        if not packed and (tuple(parameter.shape) != shape or not parameter.is_contiguous()):
            return None
        dtype = str(parameter.dtype).removeprefix("torch.")
        found.append(LearntParameter(module_name, name, dtype, shape, packed, made))
    return found


WeightTransferEngineFactory.register_engine(TRANSFER, PracticumTransfer)
